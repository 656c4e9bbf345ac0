"""The table of what is answered for which mechanism, relation and sampling, made by asking the code."""

from __future__ import annotations

from collections.abc import Callable

from jaxacct.core.validation import InputError
from jaxacct.mechanisms.balls_in_bins import BallsInBins, replaced_in_two_steps
from jaxacct.mechanisms.base import BaseMechanism, Mechanism
from jaxacct.mechanisms.combinators import Composed, Repeated
from jaxacct.mechanisms.concentrated import ZCDP
from jaxacct.mechanisms.discrete import DiscreteGaussian, DiscreteLaplace
from jaxacct.mechanisms.finite import ApproximateDP, PureDP, RandomizedResponse
from jaxacct.mechanisms.finite_output import FiniteOutput
from jaxacct.mechanisms.gaussian import Gaussian
from jaxacct.mechanisms.gaussian_mixture import MixtureOfGaussians
from jaxacct.mechanisms.laplace import Laplace
from jaxacct.mechanisms.loss_components import components, directions
from jaxacct.mechanisms.poisson_sampled import PoissonSampled
from jaxacct.mechanisms.profile import PrivacyProfile
from jaxacct.mechanisms.propose_test_release import ProposeTestRelease
from jaxacct.mechanisms.random_allocation import RandomAllocation
from jaxacct.mechanisms.selection_by_noise import ExponentialMechanism, GaussianNoisyMax, ReportNoisyMax
from jaxacct.mechanisms.smooth_sensitivity import SmoothSensitivityGaussian
from jaxacct.mechanisms.sparse_vector import AboveThreshold, NumericSparse
from jaxacct.mechanisms.without_replacement import SampledWithoutReplacement

__all__ = ["EXAMPLES", "table"]

Sampling = Callable[[BaseMechanism, float], Mechanism]
"""A class of sampled mechanisms: takes a base mechanism and a rate or share."""

EXAMPLES: tuple[Mechanism, ...] = (
    Gaussian(1.0),
    Laplace(1.0),
    DiscreteGaussian(1.0),
    DiscreteLaplace(1.0),
    RandomizedResponse(0.75),
    FiniteOutput([0.5, 0.3, 0.2], [0.2, 0.5, 0.3]),
    PureDP(1.0),
    ApproximateDP(1.0, 1e-6),
    ZCDP(0.1),
    PrivacyProfile([0.0, 1.0], [0.3, 0.0]),
    ExponentialMechanism(1.0),
    ReportNoisyMax(1.0),
    GaussianNoisyMax(4.0, 10),
    RandomAllocation(Gaussian(4.0), 10),
    BallsInBins(Gaussian(4.0), 10, 1),
    MixtureOfGaussians(2.0, [0.0, 1.0, 2.0], [0.5, 0.4, 0.1]),
    SmoothSensitivityGaussian(4.0, 0.05),
    AboveThreshold(4.0, 4.0),
    NumericSparse(4.0, 4.0, 4.0),
    ProposeTestRelease(Gaussian(4.0), 2.0, 40.0),
    Repeated(Gaussian(4.0), 10),
    Composed((Gaussian(4.0), Laplace(4.0))),
)
"""One of every class that is not itself a sampling of another."""

_RELATIONS = {"add/remove": "add_or_remove_one", "zero out": "zero_out", "replace": "replace_one"}
"""How the table calls the relations that it has columns for."""


def table() -> str:
    """Markdown: a row for every mechanism, a column for every relation and sampling; see README.md.

    >>> print(table().splitlines()[3][:71])
    | Laplace | certified | certified | certified | certified | certified |
    """
    samplings: dict[str, Sampling | None] = {
        "": None,
        ", Poisson": PoissonSampled,
        ", without replacement": SampledWithoutReplacement,
    }
    head = [f"{name}{sampling}" for sampling in samplings for name in _RELATIONS]
    lines = [
        f"| mechanism | {' | '.join(head)} | epsilon at delta 0 |",
        "|---" * (len(head) + 2) + "|",
    ]
    for example in EXAMPLES:
        cells = [
            _answer(example, sampling, relation) for sampling in samplings.values() for relation in _RELATIONS.values()
        ]
        lines.append(f"| {type(example).__name__} | {' | '.join(cells)} | {_bounded(example)} |")
    return "\n".join(lines) + "\n"


def _answer(example: Mechanism, sampling: Sampling | None, relation: str) -> str:
    """The kind of the answer, or that there is none."""
    try:
        if sampling is None:
            asked = example
        elif isinstance(example, BaseMechanism):
            asked = sampling(example, 0.1)
        else:
            return "refused"
        if relation == "replace_one" and replaced_in_two_steps(asked):
            return "bound"  # removed and added, without a pair
        for direction in directions(asked, relation):
            components(asked, relation, direction)
    except InputError:
        return "refused"
    return asked.kind_of_bracket(relation)


def _bounded(example: Mechanism) -> str:
    """Whether the loss is bounded, so that epsilon at delta 0 is finite."""
    parts = components(example, "add_or_remove_one", "remove")
    unbounded = bool((parts.mu > 0.0).any() or (parts.gauss_n > 0.0).any() or (parts.delta_infinity > 0.0).any())
    return "no" if unbounded else "yes"
