"""Early stop: a rule that uses the sparse vector technique, and ends a run when a private score no longer rises."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from jaxacct.core.validation import COUNT, NON_NEGATIVE, Constraint, InputError, check_one
from jaxacct.mechanisms import AboveThreshold, Mechanism, compose
from jaxacct.samplers.exact_draws import KeyedBits, discrete_laplace

UNITS = 2**20
"""Units in 1.0, the most that a record adds to a score.  Scores are whole units, so sums are exact."""
_EPSILON = Constraint("use an ordinary {name}, such as 0.1", 1e-10, 1e10)


@dataclass(frozen=True)
class EarlyStop:
    """Rule of a `Plan`: the run ends once a score on private data no longer rises.

    A score is a sum over validation records of values in [0, 1], such as the number of right predictions.  Let m be the
    largest of the last `patience` scores, and b the largest of all scores before them.  The run ends when

        m - b + noise_1 <= gain + noise_2.

    noise_1 is Laplace noise of scale 4/epsilon, drawn afresh for each score.  noise_2 is Laplace noise of scale
    2/epsilon, drawn once for the run.  (Both are drawn exactly, as multiples of 2^-20.)  One record changes m - b by at
    most 1.  So all answers together, however many, are epsilon-DP under add or remove, and 2 epsilon-DP under
    replace_one.

    The plan's epsilon covers all its steps and all these answers.  So a validation record may be a training record as
    well, but must occur only once among the validation records.  Ending early saves steps, not epsilon.

    Parameters
    ----------
    epsilon : from 1e-10 to 1e10, the epsilon of all answers together under add or remove.
    every : number of steps from one score to the next.
    patience : number of scores in a row that must bring no gain before the run ends.
    gain : >= 0, in records.  A rise of the score by at most `gain` does not count.

    References
    ----------
    Dwork and Roth (2014), Theorem 3.23 (sparse vector technique).
    Vadhan, Zhang (2023), Concurrent Composition Theorems for Differential Privacy.

    >>> EarlyStop(epsilon=0.2, every=50).mechanism
    AboveThreshold(threshold_scale=10.0, query_scale=20.0, answers=1.0, monotone=False)
    """

    epsilon: float
    every: int
    patience: int = 3
    gain: float = 0.0

    def __post_init__(self) -> None:
        for name, rule in (("epsilon", _EPSILON), ("every", COUNT), ("patience", COUNT), ("gain", NON_NEGATIVE)):
            check_one(name, getattr(self, name), rule, "a plan has one rule")

    @property
    def mechanism(self) -> AboveThreshold:
        """Mechanism that covers all answers of the rule in a run."""
        return AboveThreshold(2.0 / self.numbers[0], 4.0 / self.numbers[0])

    @property
    def numbers(self) -> tuple[float, int, int, float]:
        """The fields in their order, as Python numbers, as a plan's document stores them."""
        return float(self.epsilon), int(self.every), int(self.patience), float(self.gain)

    def ends(self, scores: Sequence[int], key: bytes, chain: bytes) -> bool:
        """Return whether the run ends.  Call `Ledger.spend(rule.mechanism)` before the first call.

        scores : all scores so far, in units of 2^-20 (`UNITS`).
        key : the secret key of the run.
        chain : 32 bytes that differ from step to step.  The noise of a score derives from key, chain and m - b.  So a
            repeated call gives the same answer, and another chain or m - b gives other noise.
        """
        _, _, patience, gain = self.numbers
        if len(scores) <= patience:
            return False
        rise = max(scores[-patience:]) - max(scores[:-patience])
        rule = repr(self.numbers)
        # the factor 1 + 2^-40 enlarges the noise, so that rounding cannot make the claimed epsilon too small
        drawn = lambda what, scale: discrete_laplace(
            Fraction(scale) * UNITS * (1 + Fraction(1, 2**40)), KeyedBits(hmac.digest(key, what, "sha256"))
        )
        threshold = drawn(b"early stop, threshold" + rule.encode(), self.mechanism.threshold_scale)
        noise = drawn(b"early stop, score" + chain + f"{rule} {rise}".encode(), self.mechanism.query_scale)
        return round(gain * UNITS) - rise + noise >= threshold


def early_stop_of(node: object) -> EarlyStop | None:
    """Return the rule in a plan's document: four numbers, or null for None; raise InputError for anything else."""
    if node is None:
        return None
    if not isinstance(node, list) or len(node) != 4 or any(isinstance(x, bool) or np.ndim(x) for x in node):
        raise InputError("plan: early_stop must be a list of epsilon, every, patience and gain, or null")
    return EarlyStop(*node)


def with_early_stop(mechanism: Mechanism, rule: EarlyStop | None) -> Mechanism:
    """Return `mechanism` composed with all answers of an early-stop rule; without a rule return `mechanism` itself."""
    return mechanism if rule is None else compose(mechanism, rule.mechanism)
