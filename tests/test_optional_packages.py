"""A name whose package is not installed raises an error that names the package's extra; all other names work."""

import pathlib
import re
import subprocess
import sys
import tomllib

import jax.numpy as jnp
import pytest
from helpers import refusal
from test_front_door import PACKAGES

import jaxacct as ja
from jaxacct import cli
from jaxacct.cli.arguments import parse
from jaxacct.core.lazy_exports import EXTRAS
from jaxacct.interop import to_jax_privacy
from jaxacct.strategies import BLT

ROOT = pathlib.Path(ja.__file__).parent
SOURCES = {path: path.read_text() for path in ROOT.rglob("*.py")}
PROJECT = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
OF_NOTEBOOKS = "IPython"
"""This package is imported only in a notebook, which IPython itself runs. So no extra brings it."""


def imported(source):
    """Return the modules that a source imports, those named in a string included."""
    by_name = r"(?:import_module|optional_package)\(\s*\"([\w.]+)\""
    return map("".join, re.findall(rf"^\s*(?:from ([\w.]+) import|import ([\w.]+))|{by_name}", source, re.MULTILINE))


def test_every_optional_import_has_an_extra_that_brings_it():
    tops = {name.partition(".")[0] for source in SOURCES.values() for name in imported(source)}
    needed = {re.split("[><=]", each)[0] for each in PROJECT["dependencies"]} | {"jaxacct"} | sys.stdlib_module_names
    assert tops - needed - {OF_NOTEBOOKS} == set(EXTRAS)
    for distribution, extra in EXTRAS.values():
        brought = [re.split("[><=]", each)[0] for each in PROJECT["optional-dependencies"][extra]]
        assert distribution in brought


def test_every_remedy_in_the_sources_names_an_extra():
    for path, source in SOURCES.items():
        assert not re.search(r"pip install (it|\{module\})\b", source), path
        named = re.findall(r"pip install \'jaxacct\[(\w+)\]\'", source)
        assert set(named) <= set(PROJECT["optional-dependencies"]), path


def test_no_room_fails_to_be_looked_at_where_every_optional_package_is_absent():
    """Every use of a name that needs an absent package raises an error of one line. So does the verifier."""
    hidden = [*EXTRAS, "equinox", "torch"]
    uses = ("interop.supports()", "from jaxacct.interop import supports", "type('Own', (interop.supports,), {})")
    words = "jaxacct.interop.supports needs the package dp-accounting; pip install 'jaxacct[interop]'"
    code = (
        f"import sys\nfor name in {hidden!r}:\n    sys.modules[name] = None\n"
        "import importlib, inspect, pydoc\n"
        f"for package in {PACKAGES!r}:\n"
        "    room = importlib.import_module(package)\n"
        "    for name in {*dir(room), *getattr(room, '__all__', [])}:\n"
        "        assert hasattr(room, name), (package, name)\n"
        "    found = dict(inspect.getmembers(room))\n"
        "    assert set(room.__all__) <= set(found), package\n"
        "    assert pydoc.render_doc(room)\n"
        "    exec(f'from {package} import *')\n"
        "import jaxacct as ja\n"
        "from jaxacct import interop\n"
        f"for use in {uses!r}:\n"
        "    try:\n        exec(use)\n"
        f"    except ModuleNotFoundError as error:\n        assert str(error) == {words!r}, error\n"
        "    else:\n        raise AssertionError(use)\n"
        "ja.verify(ja.Gaussian(1.0), ja.epsilon(ja.Gaussian(1.0), 1e-5), delta=1e-5)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    remedy = "verify needs the package python-flint; pip install 'jaxacct[verify]'"
    assert done.stderr.strip().endswith(remedy), done.stderr


def table():
    return ja.sweep({"noise_multiplier": [2.0], "sampling_probability": 1.0, "steps": 1, "delta": 1e-5})


def trained(**more):
    import optax

    from jaxacct.training import Plan, Trainer

    plan = Plan(target_delta=1e-5, dataset_size=4, sampling_probability=1.0, noise_multiplier=1.0, steps=1)
    trainer = Trainer(jnp.dot, optax.sgd(0.1), plan, 1.0)
    return trainer.fit(trainer.init(jnp.zeros(2)), jnp.ones((4, 2)), progress=False, **more)


DOORS = {
    "jax_privacy": lambda path: to_jax_privacy(BLT(1, steps=2)),
    "matplotlib": lambda path: ja.profile(ja.Gaussian(1.0)).plot(),
    "orbax": lambda path: trained(checkpoints=path / "run"),
    "pandas": lambda path: table().to_pandas(),
    "streamlit": lambda path: cli.run(parse(["explore"])),
    "pyarrow": lambda path: table().to_parquet(path / "one.parquet"),
    "xarray": lambda path: table().to_xarray(),
    "optax": lambda path: ja.training.noisy_mean(ja.training.fresh_key(), 1.0, 1.0, 10.0),
}


@pytest.mark.parametrize("module", DOORS)
def test_the_remedy_is_the_extra(module, tmp_path, monkeypatch):
    for name in [each for each in sys.modules if each.partition(".")[0] == module]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, module, None)
    distribution, extra = EXTRAS[module]
    told = f"needs the package {distribution}; pip install 'jaxacct[{extra}]'"
    assert told in refusal(DOORS[module], tmp_path)
