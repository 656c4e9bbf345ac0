"""The old address of `jaxacct.sweeps`: `from jaxacct.sweep import merge` and `jaxacct.sweep.merge` go on working.

`jaxacct.sweep` is a function.  After running a submodule the import system binds what `sys.modules` holds under the
submodule's name to its package, so this file puts the function there: whatever was imported before, and in whichever
order, `jaxacct.sweep` is the function.  The names that used to live here are its attributes.
"""

import importlib
import sys
from typing import Any, cast

from jaxacct.sweeps import FailedRows, Grid, Plan, SweepInterrupted, Table, merge, plan, read_grid, read_table, sweep

__all__ = [
    "FailedRows",
    "Grid",
    "Plan",
    "SweepInterrupted",
    "Table",
    "merge",
    "plan",
    "read_grid",
    "read_table",
    "sweep",
]

_MODULES = ("columns", "grid", "journal", "parts", "read", "repetitions", "run", "solve", "table")
"""Modules that have kept their names; `import jaxacct.sweep.grid` finds them too."""

for _name in __all__:
    setattr(sweep, _name, globals()[_name])
for _name in _MODULES:
    sys.modules[f"{__name__}.{_name}"] = importlib.import_module(f"jaxacct.sweeps.{_name}")
sys.modules[__name__] = cast(Any, sweep)
