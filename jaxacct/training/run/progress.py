"""The line shown while training: steps, rate, time left, and what is spent."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import jax

from jaxacct.core.progress import Progress
from jaxacct.core.text import outward
from jaxacct.training.plan import Plan

__all__ = ["Live"]

PAUSES = (0.2, 10.0)
"""Seconds between two updates; each waits for the step to be done, so that the rate is one of steps done."""


class Live:
    """One line on standard error, with an upper bound of epsilon from the plan's table; show None: on a terminal.

    The table is computed in a thread of its own, begun with the first line that is shown: training does not wait for
    the programs to be compiled, and lines say nothing of epsilon until it is there.  (No daemon: a compilation must not
    be cut off when the interpreter ends, which waits for it.)  A table that cannot be computed, as when the interpreter
    is ending, is not shown.
    """

    def __init__(self, plan: Plan, there: int, show: bool | None) -> None:
        self._plan = plan
        self._progress = Progress(plan.steps, show, there, "steps", PAUSES)
        self.table: threading.Thread | None = None

    def update(self, step: int, device: Any) -> None:
        """Show that so many steps are done; ``device`` is a result of the last one."""
        if self._progress.due(step):
            jax.block_until_ready(device)
            self._progress.update(step, self._epsilon(step))

    def _epsilon(self, step: int) -> str:
        if self._plan.has_curve:
            return f"  epsilon <= {outward(float(self._plan.live_epsilon(step).upper), '.3g', up=True)}"
        if self.table is None and step < self._plan.steps:
            self.table = threading.Thread(target=self._compute, args=(step,), name="live epsilon")
            self.table.start()
        return ""

    def _compute(self, step: int) -> None:
        with contextlib.suppress(Exception):  # for the line alone: what fails here fails in the state's epsilon, too
            self._plan.live_epsilon(step)

    def close(self) -> None:
        """Leave the line as it stands."""
        self._progress.close()
