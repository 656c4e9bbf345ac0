"""The log of a run: what a step looked like, told while later steps are under way.

Nothing waits for the device: the numbers of a step are fetched once it is done, as a rule while the next ones are being
computed.  What the log's reader does with them is outside the guarantee, since most of them are not private.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxacct import progress
from jaxacct.training.ledger import Ledger
from jaxacct.training.plan import Plan
from jaxacct.training.run.epsilon_so_far import EpsilonSoFar
from jaxacct.training.run.history import Stretch
from jaxacct.training.run.log_file import LogFile
from jaxacct.training.run.state import State
from jaxacct.training.step.key_derivation import digest
from jaxacct.training.step.step_function import Observed
from jaxacct.validation import COUNT, InputError, check

__all__ = ["Log", "RunLog", "followed_by", "is_log"]

Log = Callable[[dict[str, Any]], Any] | str | os.PathLike[str] | None
"""Where a log goes: a function of one record, the path of a file of JSON lines, or nowhere."""
MOST_PENDING = 8
"""Looks whose steps may still be under way: with more the host waits for the oldest, and the device has work left."""
WINDOW = 32
"""Looks over which the rate is taken."""
WAIT_SECONDS = 2.0
"""How long a record waits for the table of epsilon; later ones find it there."""
WORDS = 200
"""Characters of an error's message that are told."""


class _Look(NamedTuple):
    """Numbers of a step, on the device until `_fetched`; holds: whether the table of epsilon is of what was spent."""

    step: int
    observed: Observed
    holds: bool


class RunLog:
    """Takes the looks of one `fit` and tells them in order; `put` is None where there is nothing to tell, or no more."""

    def __init__(self, put: Callable[[dict[str, Any]], Any] | None, every: int, run: str, epsilon: EpsilonSoFar) -> None:
        self._put, self._every, self._run, self._epsilon = put, every, run, epsilon
        self._pending: deque[_Look] = deque()
        self._fetched: deque[tuple[float, bool, dict[str, Any]]] = deque()
        self._recent: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._begin = time.monotonic()

    def look(self, step: int, observed: Observed, stretches: tuple[Stretch, ...]) -> None:
        """So many steps have been handed to the device, the last of which has these numbers.

        stretches : of what was spent until then, where no ledger holds it.
        """
        if self._put is None or (step % self._every and step != self._epsilon.plan.steps):
            return
        for leaf in jax.tree_util.tree_leaves(observed):
            leaf.copy_to_host_async()
        self._epsilon.begin()
        self._pending.append(_Look(step, observed, self._epsilon.holds(step, stretches)))
        while self._pending and (len(self._pending) > MOST_PENDING or _is_there(self._pending[0])):
            self._fetch()
        self._tell()

    def close(self) -> None:
        """Tell what is left; what cannot be fetched, as after a failure of the device, is left out."""
        with contextlib.suppress(Exception):
            while self._put is not None and self._pending:
                self._fetch()
        self._tell(everything=True)

    def _fetch(self) -> None:
        """The numbers of the oldest look, which are waited for."""
        look = self._pending.popleft()
        now = time.monotonic()
        told = numbers_of(look.observed)
        told["seconds"] = now - self._begin
        self._recent.append((look.step, now))
        first, since = self._recent[0]
        told["steps_per_second"] = (look.step - first) / (now - since) if now > since else None
        record = {"event": "step", "run": self._run, "step": look.step, "not_private": told}
        self._fetched.append((now, look.holds, record))

    def _tell(self, everything: bool = False) -> None:
        """Hand over records in their order, from the first on whose epsilon is known or has been waited for."""
        if everything and self._fetched:
            self._epsilon.wait(WAIT_SECONDS)
        while self._fetched:
            since, holds, record = self._fetched[0]
            if not (everything or self._epsilon.ready or time.monotonic() - since > WAIT_SECONDS):
                return
            self._fetched.popleft()
            self.tell(record | {"epsilon": self._epsilon.told(record["step"], holds)})

    def tell(self, record: dict[str, Any]) -> None:
        """Hand a record over.  Whoever takes it does not stop the run by failing: it is told nothing more."""
        if self._put is None:
            return
        try:
            self._put(record)
        except Exception as error:
            self._put = None
            words = " ".join(f"{type(error).__name__}: {error}".split())[:WORDS]
            progress.say(f"jaxacct: log raised {words}; training goes on without it")


def numbers_of(observed: Observed) -> dict[str, Any]:
    """The numbers of a step as plain ones, waited for; None for a mean over nobody."""
    loss, clipped, not_finite, members = (np.asarray(x).item() for x in observed)
    return {
        "loss": loss / members if members else None,
        "clipped_share": clipped / members if members else None,
        "not_finite": not_finite,
        "members": members,
    }


def _is_there(look: _Look) -> bool:
    return all(leaf.is_ready() for leaf in jax.tree_util.tree_leaves(look.observed))
