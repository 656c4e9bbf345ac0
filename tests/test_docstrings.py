"""Every public name says what it takes, gives and refuses, where its formula comes from, and shows itself at work.

The headings are those of NumPy's style.  What a name does not need is stated here as data, each group with its reason;
everything else is required.
"""

import dataclasses
import importlib
import importlib.util
import inspect
import re
from typing import Any

import pytest
from test_front_door import PACKAGES, public

NOT_CALLED = {
    "DIRECTIONS": "jaxacct.mechanisms",
    "SAMPLING": "jaxacct.mechanisms",
    "RELATIONS": "jaxacct.mechanisms",
    "BOUNDS": "jaxacct.selection",
    "CHACHA20": "jaxacct.training",
}
"""Public constants, which have no docstring of their own, and their packages."""
BARE = re.compile(r"InputError\n *(Invalid values|A value outside its limits(, with its index)?)\.")
"""What goes without saying: every name refuses bad input by an InputError (`jaxacct.InputError`)."""
NO_FORMULA = {
    "jaxacct.AllowedRepetitions",
    "jaxacct.Bounds",
    "jaxacct.CacheInfo",
    "jaxacct.Calibration",
    "jaxacct.RiskTable",
    "jaxacct.InputError",
    "jaxacct.Mechanism",
    "jaxacct.Verification",
    "jaxacct.audit.Cells",
    "jaxacct.audit.Claim",
    "jaxacct.audit.Game",
    "jaxacct.audit.LowerBound",
    "jaxacct.audit.Played",
    "jaxacct.audit.Report",
    "jaxacct.audit.Row",
    "jaxacct.audit.attack_cells",
    "jaxacct.audit.cell_counts",
    "jaxacct.audit.coin_guesses",
    "jaxacct.audit.count_winners",
    "jaxacct.audit.finite",
    "jaxacct.cache_info",
    "jaxacct.clear_cache",
    "jaxacct.explain",
    "jaxacct.interop.CertifiedAccountant",
    "jaxacct.interop.from_dp_event",
    "jaxacct.interop.from_jax_privacy",
    "jaxacct.interop.from_json",
    "jaxacct.interop.supports",
    "jaxacct.interop.to_dp_event",
    "jaxacct.interop.to_jax_privacy",
    "jaxacct.interop.to_json",
    "jaxacct.mechanisms.BaseMechanism",
    "jaxacct.mechanisms.batch_shape",
    "jaxacct.sweep",
    "jaxacct.sweeps.FailedRows",
    "jaxacct.sweeps.Grid",
    "jaxacct.sweeps.Plan",
    "jaxacct.sweeps.SweepInterrupted",
    "jaxacct.sweeps.Table",
    "jaxacct.sweeps.merge",
    "jaxacct.sweeps.plan",
    "jaxacct.sweeps.read_grid",
    "jaxacct.sweeps.read_table",
    "jaxacct.training.Clipped",
    "jaxacct.training.Ledger",
    "jaxacct.training.Plan",
    "jaxacct.training.Segment",
    "jaxacct.training.State",
    "jaxacct.training.Trainer",
    "jaxacct.training.norm_methods",
    "jaxacct.training.over_micro_batches",
    "jaxacct.tuning.Advice",
    "jaxacct.tuning.Choice",
    "jaxacct.tuning.Cost",
    "jaxacct.tuning.Distribution",
    "jaxacct.tuning.Grid",
    "jaxacct.tuning.LogUniform",
    "jaxacct.tuning.Random",
    "jaxacct.tuning.Space",
    "jaxacct.tuning.SubsetTuned",
    "jaxacct.tuning.Tried",
    "jaxacct.tuning.Tuned",
    "jaxacct.tuning.Uniform",
    "jaxacct.tuning.grid",
    "jaxacct.tuning.Winner",
    "jaxacct.tuning.key_words",
    "jaxacct.tuning.side_by_side",
    "jaxacct.tuning.truncated",
    "jaxacct.verify",
}
"""Names that rest upon no formula or theorem of their own (records, files, counts of what was drawn): no References."""
NOT_YET: set[str] = set()
"""Names whose docstrings are still to be written."""


def documented() -> dict[str, Any]:
    """Every public name of every public package. A value with several names or packages appears once."""
    found: dict[str, Any] = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in public(package):
            if NOT_CALLED.get(name) == package or ("pacus" in name and not importlib.util.find_spec("opacus")):
                continue
            value = getattr(module, name)
            if not any(value is known for known in found.values()):
                found[f"{package}.{name}"] = value
    return found


NAMES = documented()


def parameters(value: Any) -> list[str]:
    """The names of the arguments that a function or a class takes."""
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value) if field.init]
    if inspect.isclass(value) and hasattr(value, "_fields"):
        return list(value._fields)
    if inspect.isclass(value) and value.__init__ in (object.__init__, BaseException.__init__, UserWarning.__init__):
        return []
    return [name for name in inspect.signature(value).parameters if name not in ("self", "args", "kwargs")]


def section(text: str, heading: str) -> str | None:
    """What stands under a heading, up to the next heading or the first example."""
    match = re.search(rf"^{heading}\n-{{{len(heading)}}}\n(.*?)(?=^\w+\n---|^>>> |\Z)", text, re.M | re.S)
    return match and match[1].strip()


def lacking(home: str, value: Any) -> list[str]:
    """What a docstring should say and does not."""
    text = inspect.getdoc(value) if "__doc__" not in vars(value) or value.__doc__ else None
    if not text or text.startswith(f"{value.__name__}("):  # what dataclasses and records make by themselves
        return ["a docstring"]
    missing = []
    if not re.match(r"\S.*[.:](\n\n|\Z|  \S)", text, re.S):
        missing.append("a summary")
    taken = parameters(value)
    listed = section(text, "Parameters")
    if taken and listed is None:
        missing.append("Parameters")
    elif taken:
        named = {
            n.strip("* ") for line in listed.splitlines() if line[:1].strip() for n in line.split(" : ")[0].split(",")
        }
        missing += [f"the parameter {name}" for name in taken if name not in named]
        missing += [f"no parameter {name}, which it does not take" for name in named - set(taken)]
    if not inspect.isclass(value) and not section(text, "Returns"):
        missing.append("Returns")
    if BARE.fullmatch(section(text, "Raises") or ""):
        missing.append("what else it raises; that bad input is refused goes without saying")
    if (taken or not inspect.isclass(value)) and home not in NO_FORMULA and not section(text, "References"):
        missing.append("References")
    if ">>> " not in text:
        missing.append("an example")
    return missing


@pytest.mark.parametrize("home", sorted(NAMES))
def test_every_public_name_is_documented(home):
    missing = lacking(home, NAMES[home])
    if home in NOT_YET:
        assert missing, f"{home} is documented; take it out of NOT_YET"
    else:
        assert not missing, f"{home} lacks {', '.join(missing)}"


def test_what_is_left_out_exists():
    assert set(NAMES) >= NO_FORMULA | NOT_YET
    assert all(hasattr(importlib.import_module(package), name) for name, package in NOT_CALLED.items())
