"""The front door: what a type checker sees, what is imported when first used, and names that mean one thing."""

import ast
import importlib
import importlib.util
import inspect
import os
import pathlib
import pkgutil
import subprocess
import sys

import pytest

import jaxacct

ROOT = pathlib.Path(jaxacct.__file__).parent
USER_SCRIPT = pathlib.Path(__file__).parent / "typing" / "user_script.py"
PACKAGES = (
    "jaxacct",
    *(
        f"jaxacct.{name}"
        for name in (
            "audit",
            "interop",
            "mechanisms",
            "plots",
            "report",
            "representations",
            "samplers",
            "selection",
            "strategies",
            "sweeps",
            "training",
            "tuning",
            "verification",
        )
    ),
)
"""The packages whose `__all__` is public."""


def source(package: str) -> ast.Module:
    return ast.parse((ROOT.joinpath(*package.split(".")[1:]) / "__init__.py").read_text())


def public(package: str) -> list[str]:
    """The literal list `__all__`, which checkers read too."""
    (value,) = (
        node.value
        for node in source(package).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return ast.literal_eval(value)


def imported(body: list[ast.stmt], package: str) -> dict[str, str]:
    """The names that statements import from jaxacct, each with its module as the table of lazy exports writes it."""
    return {
        alias.asname or alias.name: (node.module or "").removeprefix(f"{package}.")
        for node in body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxacct.")
        for alias in node.names
    }


def modules(package: str) -> set[str]:
    """The modules and packages directly inside a package."""
    return {module.name for module in pkgutil.iter_modules(importlib.import_module(package).__path__)}


def run(code: str) -> str:
    """Run code in a process that has imported nothing; its standard error, empty if all went well."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT.parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


def run_each(codes: list[str], given: str = "") -> str:
    """`run` for several codes in one process, which imports jaxacct anew for each code, and other packages once.

    given : what every code begins with.
    """
    each = (
        "import sys\nfor code in CODES:\n"
        "    for name in [name for name in sys.modules if name.partition('.')[0] == 'jaxacct']:\n"
        "        del sys.modules[name]\n"
        "    try:\n        exec(GIVEN + code, {})\n"
        "    except BaseException as error:\n        raise RuntimeError(code) from error\n"
    )
    return run(f"GIVEN, CODES = {given!r}, {codes!r}\n{each}")


# What is imported when first used


def test_every_package_with_public_names_is_listed():
    found = {
        f"jaxacct.{name}"
        for name in modules("jaxacct")
        if (ROOT / name / "__init__.py").is_file() and "__all__" in (ROOT / name / "__init__.py").read_text()
    }
    assert found == set(PACKAGES[1:]) | {"jaxacct.cli"}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_table_the_checkers_imports_and_all_agree(package):
    body = source(package).body
    checked = [node for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    seen_by_checkers = imported([statement for node in checked for statement in node.body], package)
    table = getattr(importlib.import_module(package), "_HOMES", {})
    assert table == seen_by_checkers
    defined = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    eager = set(imported(body, package)) - {"lazy_exports"}
    assert set(public(package)) == set(table) | (eager & set(public(package))) | (defined & set(public(package)))
    assert len(public(package)) == len(set(public(package)))
    assert not table or set(public(package)) >= eager | set(table)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_there_and_listed(package):
    module = importlib.import_module(package)
    for name in public(package):
        if name == "register_opacus" or (name == "OpacusAccountant" and not importlib.util.find_spec("opacus")):
            continue
        assert getattr(module, name) is getattr(module, name)
        assert name in dir(module)
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018


def test_importing_the_library_imports_neither_jax_nor_scipy():
    assert run("import sys, jaxacct; assert not {'jax', 'scipy', 'flax'} & set(sys.modules)") == ""


def test_the_marker_of_a_typed_package_is_there():
    assert (ROOT / "py.typed").is_file()


# Names that mean one thing


def test_no_public_name_is_a_module_of_its_package():
    """Importing a module sets the package attribute of that name, so a public name of that name would be lost."""
    clashes = {(package, name) for package in PACKAGES for name in public(package) if name in modules(package)}
    assert not clashes


@pytest.mark.slow
def test_a_public_name_stays_what_it_is_in_every_order_of_imports():
    """A public name is the same object whether all modules are imported before its first use or after it."""
    everything = "import importlib\nfor name in MODULES:\n    importlib.import_module(name)\n"
    needs = {"opacus": "jaxacct.interop.opacus_accountant", "streamlit": "jaxacct.cli.explore_page"}
    optional = tuple(module for package, module in needs.items() if not importlib.util.find_spec(package))
    names = [(p, n) for p in PACKAGES for n in public(p) if "pacus" not in n]
    walked = [
        module.name
        for module in pkgutil.walk_packages([str(ROOT)], "jaxacct.")
        if not module.name.startswith(("jaxacct.__main__", *optional))
    ]
    ask = "found = {(p, n): getattr(importlib.import_module(p), n) for p, n in NAMES}\n"
    check = (
        "import types\nwrong = [key for key, value in found.items() if isinstance(value, types.ModuleType)]\n"
        "assert not wrong, wrong\n"
        "again = {(p, n): getattr(importlib.import_module(p), n) for p, n in NAMES}\n"
        "assert all(again[key] is value for key, value in found.items())\n"
    )
    given = f"import importlib\nMODULES, NAMES = {walked!r}, {names!r}\n"
    assert run_each([everything + ask + check, ask + everything + check], given) == ""


def test_the_signature_of_sweep_is_its_own():
    assert "noise" not in str(inspect.signature(jaxacct.sweep)) and "shard" in str(inspect.signature(jaxacct.sweep))


def test_training_has_the_strategies():
    from jaxacct import strategies, training

    assert training.strategies is strategies and "strategies" in dir(training)


# What a type checker knows


def test_the_users_script_names_every_public_name():
    tree = ast.parse(USER_SCRIPT.read_text())
    named: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named |= {alias.asname or alias.name: alias.name for alias in node.names if "jaxacct" in alias.name}
        elif isinstance(node, ast.ImportFrom) and node.module == "jaxacct":
            named |= {alias.asname or alias.name: f"jaxacct.{alias.name}" for alias in node.names}
    used = {
        (named[node.value.id], node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in named
    }
    missing = {(package, name) for package in PACKAGES for name in public(package)} - used
    assert not missing, "add these names to tests/typing/user_script.py"


@pytest.mark.slow  # mypy of CI reads the script, too
def test_a_strict_checker_accepts_the_users_script_and_reports_what_is_misspelt(tmp_path):
    """The checker treats jaxacct as installed: it reports no errors inside jaxacct, only those of the script."""
    pytest.importorskip("mypy", reason="the test extra installs mypy")
    text = USER_SCRIPT.read_text()
    broken = {"misspelt_function": ("ja.epsilon(", "ja.epsilonn("), "misspelt_keyword": ("relation=", "relatoin=")}
    files = {"sound": text} | {name: text.replace(*words, 1) for name, words in broken.items()}
    for name, content in files.items():
        (tmp_path / f"{name}.py").write_text(content)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-error-summary"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*command, "--cache-dir", os.devnull, *(f"{name}.py" for name in files)],
        cwd=tmp_path,
        env=environment | {"MYPYPATH": str(ROOT.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert done.stderr == "" and sorted(line.partition(".py")[0] for line in errors) == sorted(broken)
    assert 'Module has no attribute "epsilonn"' in done.stdout
    assert 'Unexpected keyword argument "relatoin"' in done.stdout


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_function_and_method_is_annotated(package):
    module = importlib.import_module(package)
    wrong = []
    for name in public(package):
        if "pacus" in name and not importlib.util.find_spec("opacus"):
            continue
        value = getattr(module, name)
        parts = vars(value).items() if inspect.isclass(value) else [("", value)]
        for part, member in parts:
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if not inspect.isfunction(function) or (part.startswith("_") and part != "__init__"):
                continue
            if "dataclasses" in (function.__globals__.get("__name__"), getattr(function, "__module__", "")):
                continue
            signature = inspect.signature(function)
            given = [p.annotation for key, p in signature.parameters.items() if key not in ("self", "cls", "_cls")]
            if signature.empty in (*given, signature.return_annotation) and "namedtuple" not in str(function.__code__):
                wrong.append(f"{name}.{part}".rstrip("."))
    assert not wrong
