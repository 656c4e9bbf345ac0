"""Sweeps: solve a grid of DP-SGD configurations in blocks, on all devices and processes, and return a table."""

from jaxacct.sweeps.grid import Grid, read_grid
from jaxacct.sweeps.journal import merge
from jaxacct.sweeps.run import Plan, SweepInterrupted, plan, sweep
from jaxacct.sweeps.solve import FailedRows
from jaxacct.sweeps.table import Table, read_table

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
