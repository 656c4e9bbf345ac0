"""Sweeps: a grid of DP-SGD configurations, solved in chunks, as a table."""

from jaxacct.sweep.grid import Grid
from jaxacct.sweep.read import read_grid
from jaxacct.sweep.run import SweepInterrupted, sweep
from jaxacct.sweep.table import Table

__all__ = ["Grid", "SweepInterrupted", "Table", "read_grid", "sweep"]
