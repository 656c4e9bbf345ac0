"""The old address of `jaxacct.sweeps`: `from jaxacct.sweep import merge` and `jaxacct.sweep.merge` go on working.

`jaxacct.sweep` is a function.  After running a submodule the import system binds what `sys.modules` holds under the
submodule's name to its package, so this file puts the function there: whatever was imported before, and in whichever
order, `jaxacct.sweep` is the function.  The names that used to live here are its attributes.
"""

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

for _name in __all__:
    setattr(sweep, _name, globals()[_name])
sys.modules[__name__] = cast(Any, sweep)
