"""What a tuning costs in gradient evaluations: its expectation and quantiles, which are known before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxacct.core.validation import (
    COUNT,
    NON_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    Constraint,
    InputError,
    check,
    check_one,
    choice,
)
from jaxacct.selection import Law

__all__ = ["SPLITS", "Cost"]

SPLITS = ("everything", "rest", "all")
"""Candidates on all data and no other run; or on a sample, and the final run on the rest of the data, or on all."""
_SHARE = Constraint("use a share above 0 and at most 1", 0, 1, lower_open=True)


@dataclass(frozen=True)
class Cost:
    """Gradient evaluations of "draw K, train K candidates", and of the final run if there is one.

    Given K they are, in expectation over the samples, ``K E' q n + E n_2``: q n records per candidate for E' epochs,
    and n_2 records for E epochs, where n_2 is (1 - q) n for split "rest" and n for "all".  Split "everything" is ``K E'
    n``. An epoch is `sampling_probability * steps` of DP-SGD: passes over the records that a run works on.

    What a tuning has *really* cost is a function of K and thus secret, so it is not noted anywhere.  The expectation
    and the quantiles depend on the law of K alone and may be published.

    Parameters
    ----------
    law : Law
        One law of K.
    dataset_size : float
        Number of records n.
    epochs : float > 0
        E, of the final run (of the candidates for "everything").
    split : {"everything", "rest", "all"}
    share : float in (0, 1]
        q, of the sample; 1 for "everything".
    tuning_epochs : float > 0, optional
        E', by default E; where candidates differ in it, their mean.

    References
    ----------
    Koskela and Kulkarni (2023), section 3.4.

    >>> from jaxacct import selection
    >>> cost = Cost(selection.Poisson(15), 60_000, 40, "rest", 0.1)
    >>> cost.expected, float(cost.quantile(0.95)), Cost(selection.Poisson(15), 60_000, 40).expected / cost.expected
    (5760000.0, 7440000.0, 6.25)
    """

    law: Law
    dataset_size: Any
    epochs: Any
    split: str = "everything"
    share: Any = 1.0
    tuning_epochs: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.law, Law) or self.law.shape:
            raise InputError("law must be one law of K, not a batch; use one such as selection.Poisson(15)")
        choice("split", self.split, SPLITS)
        rules = {"dataset_size": COUNT, "epochs": POSITIVE, "share": _SHARE, "tuning_epochs": POSITIVE}
        for name, rule in rules.items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, float(check_one(name, value, rule, "a cost is of one tuning")))
        if self.tuning_epochs is None:
            object.__setattr__(self, "tuning_epochs", self.epochs)
        if self.split == "everything" and self.share != 1.0:
            raise InputError(f"share = {self.share!r} must be 1 for split 'everything'; use split='rest' or 'all'")

    @property
    def candidate(self) -> float:
        """Gradient evaluations of one candidate, in expectation over its batches."""
        return self.tuning_epochs * self.share * self.dataset_size

    @property
    def final(self) -> float:
        """Gradient evaluations of the final run."""
        records = {"everything": 0.0, "rest": 1.0 - self.share, "all": 1.0}[self.split]
        return self.epochs * records * self.dataset_size

    def of(self, candidates: Any) -> Any:
        """Gradient evaluations with that many candidates."""
        return np.asarray(check("candidates", candidates, NON_NEGATIVE))[()] * self.candidate + self.final

    @property
    def expected(self) -> float:
        """The expectation over K."""
        return float(self.law.mean) * self.candidate + self.final

    def quantile(self, p: Any) -> Any:
        """The least number of gradient evaluations that suffices with probability p, by the law of K; p in [0, 1)."""
        return self.of(self.law.quantile(check("p", p, PROBABILITY)))
