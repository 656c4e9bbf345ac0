"""Plans: the request for a run and its solution (`solver`), and the solved plan (`plan`)."""

from jaxacct.training.plan.plan import Plan
from jaxacct.training.plan.segments import Segment
from jaxacct.training.plan.solver import Filter

__all__ = ["Filter", "Plan", "Segment"]
