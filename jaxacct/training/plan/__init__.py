"""Plans of runs: `solver` finds the settings that a request leaves open, `plan` holds the solved plan."""

from jaxacct.training.plan.plan import Plan
from jaxacct.training.plan.segments import Segment
from jaxacct.training.plan.solver import Filter

__all__ = ["Filter", "Plan", "Segment"]
