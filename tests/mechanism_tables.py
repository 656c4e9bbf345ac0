"""The tables in the READMEs of mechanisms and representations, made by asking the code.

`python tests/mechanism_tables.py` prints both; `test_mechanisms_table.py` compares them with the pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxacct.core.validation import InputError
from jaxacct.mechanisms import (
    ZCDP,
    AboveThreshold,
    ApproximateDP,
    BallsInBins,
    Composed,
    DiscreteGaussian,
    DiscreteLaplace,
    ExponentialMechanism,
    FiniteOutput,
    Gaussian,
    GaussianNoisyMax,
    Laplace,
    MatrixMechanism,
    Mechanism,
    MixtureOfGaussians,
    NumericSparse,
    PartitionSelection,
    PoissonSampled,
    PrivacyProfile,
    ProposeTestRelease,
    PureDP,
    RandomAllocation,
    RandomizedResponse,
    Repeated,
    ReportNoisyMax,
    SampledWithoutReplacement,
    SmoothSensitivityGaussian,
    components,
    directions,
)
from jaxacct.representations import rdp_epsilon
from jaxacct.representations.mechanism_profile import Profile, profile
from jaxacct.strategies import Identity

Sampling = Callable[[Mechanism, float], Mechanism]
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
    GaussianNoisyMax(4.0, 4),
    RandomAllocation(Gaussian(4.0), 10),
    BallsInBins(Gaussian(4.0), 10, 1),
    MatrixMechanism(Identity(4), 4.0),
    MixtureOfGaussians(2.0, [0.0, 1.0, 2.0], [0.5, 0.4, 0.1]),
    SmoothSensitivityGaussian(4.0, 0.05),
    AboveThreshold(4.0, 4.0),
    NumericSparse(4.0, 4.0, 4.0),
    PartitionSelection(0.1, 1e-8, 10),
    ProposeTestRelease(Gaussian(4.0), 2.0, 40.0),
    Repeated(Gaussian(4.0), 10),
    Composed((Gaussian(4.0), Laplace(4.0))),
)
"""One mechanism of every class, except the classes that sample records for a base mechanism."""

RELATIONS = {"add/remove": "add_or_remove_one", "zero out": "zero_out", "replace": "replace_one"}
"""How the table calls the relations that it has columns for."""
QUESTIONS = {
    "epsilon, delta, trade-off, loss CDFs": lambda p: p.mechanism,  # all four have the mechanism's kind
    "Rényi": lambda p: p.renyi(2.0),
    "zCDP": lambda p: p.zcdp(),
    "log characteristic function": lambda p: p.log_characteristic(1.0),
    "epsilon by Rényi": lambda p: rdp_epsilon(p.mechanism, 1e-3, orders=[2.0, 8.0]),
}
"""Columns of the table of representations, each with the question that is asked."""


def table_of_mechanisms() -> str:
    """Markdown: a row for every mechanism, a column for every relation and sampling."""
    samplings: dict[str, Sampling | None] = {
        "": None,
        ", Poisson": PoissonSampled,
        ", without replacement": SampledWithoutReplacement,
    }
    head = [f"{name}{sampling}" for sampling in samplings for name in RELATIONS]
    lines = [
        f"| mechanism | {' | '.join(head)} | epsilon at delta 0 |",
        "|---" * (len(head) + 2) + "|",
    ]
    for example in EXAMPLES:
        cells = [
            _answer(example, sampling, relation) for sampling in samplings.values() for relation in RELATIONS.values()
        ]
        lines.append(f"| {type(example).__name__} | {' | '.join(cells)} | {_bounded(example)} |")
    return "\n".join(lines) + "\n"


def table_of_representations() -> str:
    """Markdown: a row for every mechanism, a column for every representation under add/remove.

    "open": certified, but the bracket has no finite upper end.
    """
    lines = [f"| mechanism | {' | '.join(QUESTIONS)} |", "|---" * (len(QUESTIONS) + 1) + "|"]
    for example in EXAMPLES:
        cells = [_kind(profile(example), question) for question in QUESTIONS.values()]
        lines.append(f"| {type(example).__name__} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _answer(example: Mechanism, sampling: Sampling | None, relation: str) -> str:
    """The kind of the mechanism's bracket, after `sampling` if given; "refused" if there is no bracket."""
    try:
        asked = example if sampling is None else sampling(example, 0.1)
        if relation == "replace_one" and asked.replaced_apart():
            return "bound"  # by a removal and an addition; no dominating pair is known
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


def _kind(asked: Profile, question: Any) -> str:
    """The kind of the answer, "open" if its upper end is infinite, or "refused"."""
    try:
        answer = question(asked)
    except InputError:
        return "refused"
    return "open" if getattr(answer, "status", "ok") == "width" and answer.upper == float("inf") else str(answer.kind)


if __name__ == "__main__":
    print(table_of_mechanisms(), table_of_representations(), sep="\n")
