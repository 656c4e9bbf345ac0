"""Epsilon of a run under the terms of a plan: of one run, or of all K runs of a tuning together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxacct import selection
from jaxacct.accounting import account
from jaxacct.core.bounds import Bounds
from jaxacct.mechanisms import Mechanism
from jaxacct.training.step.step_mechanisms import ALLOCATION, BY_PASS, Release, prefixes

__all__ = [
    "MARGIN",
    "MARGIN_OF_WHOLE_NUMBERS",
    "Terms",
    "epsilon_of_run",
    "epsilon_of_several",
    "epsilon_of_tuning",
    "tolerance",
]

CLOSENESS = 1e-4
"""How close to the target, relative to it and absolutely, the certified epsilon of a solution lies."""
_LEAST_RTOL = 1e-6
"""Never closer than this, relatively, however large the target is."""
MARGIN = 0.05
"""Share of the tolerance that is kept from the target: evaluated again, epsilon may differ by its rounding."""
MARGIN_OF_WHOLE_NUMBERS = 1e-7
"""Share of the target that is kept where whole numbers are solved for, for the same reason."""

_SHARE_OF_TOLERANCE = 0.2
"""The relative width asked of a bracket, as a share of how close to the target a solution has to lie: the width of the
bracket must not decide whether a solution is close enough."""
_RTOL_OF_ROUNDS = 1e-4
"""No more is asked where there are rounds of random allocation: the two pairs of a round leave a bracket about 4e-4
wide, which a finer lattice makes no narrower and takes two or three times as long for."""


class Terms(Protocol):
    """What a claim of a plan depends on besides the steps; a request says it as well as a solved plan."""

    @property
    def target_epsilon(self) -> float | None:
        """The epsilon to meet; None where it is only reported."""

    @property
    def target_delta(self) -> float:
        """The delta of every claim."""

    @property
    def dataset_size(self) -> int:
        """Records in the data; public."""

    @property
    def sampling(self) -> str:
        """How a batch is drawn: a word of `step_mechanisms.SAMPLING`."""

    @property
    def cap(self) -> int | None:
        """The largest batch of truncated Poisson sampling; None elsewhere, and in a request before it is chosen."""

    @property
    def relation(self) -> str:
        """Which data sets are neighbours."""

    @property
    def repetitions(self) -> Any:
        """The law of K of a tuning, or None."""

    @property
    def data_dependent(self) -> bool:
        """Whether the steps compose through a Renyi filter."""

    @property
    def candidates(self) -> str:
        """What the K runs of a tuning are taken for."""


def tolerance(target: float) -> float:
    """The relative closeness that is within CLOSENESS both relatively and absolutely."""
    return max(CLOSENESS * min(1.0, 1.0 / target), _LEAST_RTOL)


def epsilon_of_run(terms: Terms, mechanism: Mechanism) -> Bounds:
    """Epsilon at the target delta of one run, or of each of a batch of runs, composed exactly."""
    rtol = _SHARE_OF_TOLERANCE * tolerance(terms.target_epsilon or 1.0)
    if terms.sampling == ALLOCATION:
        rtol = max(rtol, _RTOL_OF_ROUNDS)
    return account.epsilon(mechanism, terms.target_delta, relation=terms.relation, rtol=rtol)


def epsilon_of_several(terms: Terms, counts: Sequence[Mapping[Release, int]], rtol: float) -> Bounds:
    """Epsilon at the target delta of several collections of releases, those of the same kinds in one call.

    In one batch a kind that an element lacks is sampled at rate 0.  Passes and rounds have no such rate.
    """
    places: dict[frozenset[Release], list[int]] = {}
    for place, each in enumerate(counts):
        kinds = frozenset(each) if terms.sampling in BY_PASS else frozenset()
        places.setdefault(kinds, []).append(place)
    parts = [
        account.epsilon(prefixes([counts[i] for i in group]), terms.target_delta, relation=terms.relation, rtol=rtol)
        for group in places.values()
    ]
    order = np.argsort(np.concatenate([*places.values()]))
    names = ("lower", "estimate", "upper", "kind", "status", "engine")
    one = lambda bounds, name: np.broadcast_to(getattr(bounds, name), np.shape(bounds.upper))
    return Bounds(*(np.concatenate([one(bounds, name) for bounds in parts])[order] for name in names))


def epsilon_of_tuning(terms: Terms, mechanism: Mechanism) -> Bounds:
    """Epsilon at the target delta through the law of K; that of one run where there are no repetitions."""
    if terms.repetitions is None:
        return epsilon_of_run(terms, mechanism)
    return epsilon_of_run(terms, selection.select(mechanism, terms.repetitions, candidates=terms.candidates))
