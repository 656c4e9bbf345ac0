"""Plans: what is asked of a run (`request`), how that is solved (`solver`), and what a solved plan says (`plan`)."""

from jaxacct.training.plan.filters import Filter
from jaxacct.training.plan.plan import Plan
from jaxacct.training.plan.schedule import Segment

__all__ = ["Filter", "Plan", "Segment"]
