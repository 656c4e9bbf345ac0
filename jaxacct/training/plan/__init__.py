"""Plans: what is asked of a run (`request`), how that is solved (`solver`), and what a solved plan says (`plan`)."""

from jaxacct.training.plan.plan import Plan
from jaxacct.training.plan.segments import Segment
from jaxacct.training.plan.solver import Filter

__all__ = ["Filter", "Plan", "Segment"]
