"""Sweeps: a grid of DP-SGD configurations, solved in blocks on all devices and processes, as a table.

`jaxacct.sweep(...)` calls the function `jaxacct.sweep.sweep`; the other names are attributes of the same package.
"""

from jaxacct.lazy import make_callable
from jaxacct.sweep.grid import Grid
from jaxacct.sweep.parts import merge
from jaxacct.sweep.plan import Plan, plan
from jaxacct.sweep.read import read_grid
from jaxacct.sweep.run import SweepInterrupted, sweep
from jaxacct.sweep.solve import FailedRows
from jaxacct.sweep.table import Table, read_table

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
make_callable(__name__, sweep)
