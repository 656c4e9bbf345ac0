"""Finds the largest mean number of candidates, E[K], that a private selection may try within a privacy budget.

The certified epsilon of the returned number itself meets the target, even if epsilon does not grow with the number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxacct.accounting import account
from jaxacct.calibration.any_parameter import search_mechanisms
from jaxacct.core import markup
from jaxacct.core.bounds import Bounds, by_column
from jaxacct.core.floats import bisected
from jaxacct.core.text import plain_record, plain_repr
from jaxacct.core.types import ArrayLike, Leaf
from jaxacct.core.validation import (
    DELTA,
    POSITIVE,
    InputError,
    broadcast_shape,
    check,
    choice,
    options,
    refuse_tracers,
    with_hints,
)
from jaxacct.engines import backend
from jaxacct.engines.protocol import Effort
from jaxacct.mechanisms import RELATIONS, Mechanism, batch_shape
from jaxacct.mechanisms.base import require_mechanism
from jaxacct.selection.law_of_k import ETA_RANGE, Law, PointMass, Poisson, TruncatedNegativeBinomial
from jaxacct.selection.mechanism import select

FAMILIES = ("geometric", "truncated_negative_binomial", "logarithmic", "poisson", "point_mass")
"""Families of laws of K, the number of runs, that can be searched. The laws of a family differ in one number."""
LARGEST_GAMMA = 1.0 - 1e-6
"""Largest gamma that is searched. E[K] is then about 1 + 5e-7 (1 + eta). gamma and eta are parameters of K's law."""
LARGEST_MEAN = 1e6
"""Largest E[K] that is searched, in every family of laws. Nobody trains that many candidates."""


@dataclass(frozen=True, eq=False, repr=False)
class AllowedRepetitions:
    """The largest numbers of candidates, with the certified epsilon that they give; made by `ja.repetitions_allowed`.

    Parameters
    ----------
    repetitions : float or numpy.ndarray; E[K], of the batch shape; NaN where `ok` is False.
    parameter : float or numpy.ndarray; gamma of the law of K, the mean of a Poisson law, or the K of a point mass.
    epsilon : Bounds at that law.  `epsilon.upper <= target_epsilon` wherever `ok`.  Elsewhere `epsilon` belongs to the
        law with the least mean that was searched.
    status : str or numpy.ndarray; "ok" (a larger number misses the target), "not_binding" (the largest number searched
        meets the target), "loose" (no larger number is shown to miss the target) or "infeasible".
    ok : bool or numpy.ndarray; whether a number of candidates meets the target.
    family : family of the law of K.
    eta : eta of a truncated negative binomial law.

    >>> import jaxacct as ja
    >>> found = ja.repetitions_allowed(ja.Gaussian(3.73), 1.6, 1e-5)
    >>> bool(found.law.mean == found.repetitions), bool(found.ok)
    (True, True)
    """

    repetitions: Leaf
    parameter: Leaf
    epsilon: Bounds
    status: Leaf
    ok: Leaf
    family: str
    eta: Leaf

    __repr__ = plain_repr

    @property
    def law(self) -> Law:
        """Return the law of K, or a batch of laws for a batch of numbers. Raise InputError if a number is not `ok`."""
        if not np.all(self.ok):
            raise InputError("no law of K meets every target; take the elements of parameter that are ok")
        return _law(self.family, self.eta, self.parameter)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain Python, ready for JSON; `Bounds.from_dict` turns its "epsilon" into Bounds."""
        return plain_record(self)

    def _repr_html_(self) -> str:
        def cells(index: tuple[int, ...]) -> list[str]:
            mean, parameter, status = (np.asarray(x)[index] for x in (self.repetitions, self.parameter, self.status))
            return [repr(float(mean)), repr(float(parameter)), f"{self.epsilon[index]:.6g}", str(status)]

        head = ("E[K]", "parameter", "epsilon", "status")
        return markup.batch(f"Candidates allowed, {self.family} law of K", head, np.shape(self.repetitions), cells)


@with_hints
def repetitions_allowed(
    run: Mechanism,
    target_epsilon: ArrayLike,
    target_delta: ArrayLike,
    *,
    family: str = "geometric",
    eta: ArrayLike | None = None,
    relation: str = "add_or_remove_one",
    rtol: float = 1e-3,
) -> AllowedRepetitions:
    """Return the largest E[K] for which "run K times, release the best" meets a privacy budget.

    A law meets the target if the certified upper end of `ja.epsilon(selection.select(run, law), target_delta)` is at
    most target_epsilon.  This epsilon is the worst case over all scores.

    Parameters
    ----------
    run : one mechanism or a batch; it broadcasts with the targets and eta.
    target_epsilon : array_like > 0; largest epsilon allowed.
    target_delta : array_like in (0, 1); delta at which epsilon is taken.
    family : {"geometric", "logarithmic", "truncated_negative_binomial", "poisson", "point_mass"}
        The family of laws of K; "point_mass" is a fixed K.
    eta : array_like > -1; eta of the truncated negative binomial laws, and of no other family.
    relation : neighbouring relation, as for `ja.epsilon`.
    rtol : largest relative distance of E[K] from a mean that misses the target.  For a point mass, that mean is the
        next whole number.

    Returns
    -------
    AllowedRepetitions
        status "not_binding" where the end of the search, E[K] = 10^6 or gamma = 10^-9, meets the target; "infeasible"
        where its beginning, E[K] = 1 (0.001 for a Poisson law), does not.

    References
    ----------
    jaxacct/selection/README.md: "How many candidates a target allows", and "What every guarantee here assumes".

    >>> import jaxacct as ja
    >>> found = ja.repetitions_allowed(ja.Gaussian(3.73), 1.6, 1e-5)
    >>> 10.0 < float(found.repetitions) < 14.0, bool(found.epsilon.upper <= 1.6), found.status
    (True, True, 'ok')
    """
    require_mechanism("run", run)
    refuse_tracers("ja.repetitions_allowed", "jaxacct.kernels.worst_score", run=run, target_epsilon=target_epsilon)
    choice("family", family, FAMILIES)
    choice("relation", relation, RELATIONS)
    if (eta is None) == (family == "truncated_negative_binomial"):
        needs = "needs eta; give one above -1" if eta is None else "takes no eta; leave it out"
        raise InputError(f"family = {family!r} {needs}")
    rtol = options(rtol=rtol, least_rtol=1e-4, usual_rtol="1e-3").rtol
    target = np.asarray(check("target_epsilon", target_epsilon, POSITIVE))
    level = np.asarray(check("target_delta", target_delta, DELTA))
    shaped = {"geometric": 1.0, "logarithmic": 0.0}.get(family, eta)
    shape_of = np.asarray(check("eta", 1.0 if shaped is None else shaped, ETA_RANGE))
    known = {"target_epsilon": target, "target_delta": level, "eta": shape_of}
    shape = broadcast_shape({"the mechanism": batch_shape(run)} | {name: x.shape for name, x in known.items()})

    def chosen(values: np.ndarray) -> Mechanism:
        return select(run, _law(family, shape_of, _parameter(family, values)))

    target, level = np.broadcast_to(target, shape), np.broadcast_to(level, shape)
    least, most = (np.broadcast_to(x, shape) for x in _ends(family, shape_of))
    with backend.job(int(np.prod(shape))):  # the search's smaller batches use the whole batch's backend
        found = search_mechanisms(
            chosen,
            target,
            level,
            (least, most),
            relation,
            Effort(1e-4),
            # The search ends where epsilon is at most 0.01 * rtol * target below the target. E[K] is then
            # within rtol of its largest value, if log epsilon grows at least a hundredth as fast as log E[K].
            rtol=0.02 * rtol,
            whole=family == "point_mass",
            closest=rtol,
        )
        first = account.epsilon(chosen(least), level, relation=relation)
    status = found.status.reshape(shape)
    ok = status != "infeasible"
    parameter = _parameter(family, np.where(ok, found.value.reshape(shape), least))
    mean = np.where(ok, np.asarray(_law(family, shape_of, parameter).mean), np.nan)
    kept = by_column(lambda one, other: np.where(ok, one, other), found.bounds(shape), first)
    word = str(status) if shape == () else status
    return AllowedRepetitions(mean[()], np.where(ok, parameter, np.nan)[()], kept, word, ok[()], family, shape_of[()])


def _law(family: str, eta: Any, parameter: Any) -> Law:
    if family == "poisson":
        return Poisson(parameter)
    return PointMass(parameter) if family == "point_mass" else TruncatedNegativeBinomial(eta, parameter)


def _parameter(family: str, values: np.ndarray) -> np.ndarray:
    """Return a law's parameter from the searched value, which is a Poisson mean, a fixed K, or the odds 1/gamma - 1."""
    return values if family in ("poisson", "point_mass") else 1.0 / (1.0 + values)


def _ends(family: str, eta: np.ndarray) -> tuple[Any, Any]:
    """Return the smallest and the largest value that is searched; `_parameter` says what the value is."""
    if family in ("poisson", "point_mass"):
        # with a Poisson mean of 1e-3, K is 0 and nothing is released in 99.9 % of cases
        return 1e-3 if family == "poisson" else 1.0, LARGEST_MEAN
    # 1e-9 is the smallest gamma that is searched, and gives the largest E[K]
    low, high = (np.full(eta.shape, np.log(1.0 / end - 1.0)) for end in (LARGEST_GAMMA, 1e-9))
    mean = lambda at: np.asarray(_law(family, eta, _parameter(family, np.exp(at))).mean)
    _, high = bisected(low, high, lambda at: mean(at) <= LARGEST_MEAN, 60)
    return np.full(eta.shape, 1.0 / LARGEST_GAMMA - 1.0), np.exp(high)
