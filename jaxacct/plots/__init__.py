"""Pictures of a sweep's result, and of mechanisms side by side (need matplotlib)."""

from jaxacct.plots.results import plot
from jaxacct.plots.side_by_side import plot_profiles, plot_risks, plot_tradeoffs

__all__ = ["plot", "plot_profiles", "plot_risks", "plot_tradeoffs"]
