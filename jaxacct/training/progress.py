"""The line shown while training: steps, rate, time left, and what is spent."""

from __future__ import annotations

import sys
import time
from typing import Any

import jax

from jaxacct.sweep.progress import bar
from jaxacct.training.plan import Plan

__all__ = ["Live"]

PAUSE = 0.2
"""Seconds between two updates; each waits for the step to be done, so that the rate is one of steps done."""


class Live:
    """One line on standard error, with an upper bound of epsilon from the plan's table; show None: on a terminal."""

    def __init__(self, plan: Plan, there: int, show: bool | None) -> None:
        self._plan, self._there = plan, there
        self._terminal = sys.stderr.isatty()
        self._show = self._terminal if show is None else show
        self._begin = time.monotonic()
        self._last = 0.0
        self._widest = 0

    def update(self, step: int, device: Any) -> None:
        """Show that so many steps are done; ``device`` is a result of the last one."""
        now = time.monotonic()
        pause = PAUSE if self._terminal else 10.0
        if not self._show or (now - self._last < pause and step < self._plan.steps):
            return
        jax.block_until_ready(device)
        self._last = time.monotonic()
        spent = float(self._plan.live_epsilon(step).upper)
        picture = bar(step, self._plan.steps, self._last - self._begin, self._there).replace("rows/s", "steps/s")
        line = f"{picture}  epsilon <= {spent:.3g}"
        self._widest = max(self._widest, len(line))
        text = f"\r{line:<{self._widest}}" if self._terminal else f"{line}\n"
        print(text, end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the line as it stands."""
        if self._show and self._terminal and self._widest:
            print(file=sys.stderr, flush=True)
