"""The line shown while training: steps, rate, time left, and what is spent."""

from __future__ import annotations

from typing import Any

import jax

from jaxacct.sweep.progress import Progress
from jaxacct.training.plan import Plan

__all__ = ["Live"]

PAUSES = (0.2, 10.0)
"""Seconds between two updates; each waits for the step to be done, so that the rate is one of steps done."""


class Live:
    """One line on standard error, with an upper bound of epsilon from the plan's table; show None: on a terminal."""

    def __init__(self, plan: Plan, there: int, show: bool | None) -> None:
        self._plan = plan
        self._progress = Progress(plan.steps, show, there, "steps", PAUSES)

    def update(self, step: int, device: Any) -> None:
        """Show that so many steps are done; ``device`` is a result of the last one."""
        if self._progress.due(step):
            jax.block_until_ready(device)
            self._progress.update(step, f"  epsilon <= {float(self._plan.live_epsilon(step).upper):.3g}")

    def close(self) -> None:
        """Leave the line as it stands."""
        self._progress.close()
