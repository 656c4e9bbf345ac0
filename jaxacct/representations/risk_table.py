"""`ja.risk`: the success of the best attack on the output of a mechanism, in one table of certified readings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxacct.core.bounds import Bounds
from jaxacct.core.text import outward
from jaxacct.core.types import ArrayLike
from jaxacct.core.validation import OPEN_PROBABILITY, check, refuse_tracers
from jaxacct.mechanisms import Mechanism, batch_shape
from jaxacct.representations.mechanism_profile import FLOOR, profile


@dataclass(frozen=True, eq=False)
class Reading:
    """One risk: its name, the rates or priors that it is taken at, and its bracket in the shape of the batch.

    Parameters
    ----------
    name : str
    at : dict of str to float
        Rates or priors, such as {"fpr": 0.01}; empty for a risk without any.
    bounds : Bounds

    >>> import jaxacct as ja
    >>> ja.risk(ja.Gaussian(1.0)).readings[0].name
    'advantage'
    """

    name: str
    at: dict[str, float]
    bounds: Bounds


@dataclass(frozen=True, eq=False, repr=False)
class RiskTable:
    """Readings of `ja.risk`, printed as a table.

    Parameters
    ----------
    readings : tuple of Reading
    relation : str

    >>> import jaxacct as ja
    >>> table = ja.risk(ja.Gaussian(1.0))
    >>> round(float(table["advantage"].upper), 6), round(float(table["true_positive_rate", 0.01].upper), 6)
    (0.382925, 0.092362)
    """

    readings: tuple[Reading, ...]
    relation: str

    def __getitem__(self, key: str | tuple[Any, ...]) -> Bounds:
        """Return the bracket of a reading by its name, or by its name and the numbers that it is taken at."""
        name, *numbers = (key,) if isinstance(key, str) else key
        named = [reading for reading in self.readings if reading.name == name]
        if not named:
            raise KeyError(f"{name!r}; use one of {', '.join(dict.fromkeys(one.name for one in self.readings))}")
        for reading in named:
            if list(reading.at.values())[: len(numbers)] == [float(number) for number in numbers]:
                return reading.bounds
        raise KeyError(f"{name} at {numbers}; it was read at {[list(reading.at.values()) for reading in named]}")

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict for each risk of each configuration: name, rates or priors, index, ends, kind and status."""
        found = []
        for reading in self.readings:
            bounds = reading.bounds
            for index in np.ndindex(bounds.shape):
                one = bounds[index]
                row = {"reading": reading.name, **reading.at} | ({"index": list(index)} if index else {})
                ends = {"lower": float(one.lower), "estimate": float(one.estimate), "upper": float(one.upper)}
                found.append(row | ends | {"kind": str(one.kind), "status": str(one.status)})
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return a dict of the relation and, under "readings", the readings with their ends as (lists of) numbers."""
        readings = []
        for one in self.readings:
            names = ("lower", "estimate", "upper", "kind", "status")
            ends = {name: np.asarray(getattr(one.bounds, name)).tolist() for name in names}
            readings.append({"reading": one.name, **one.at, **ends})
        return {"relation": self.relation, "readings": readings}

    def __repr__(self) -> str:
        lines = [("reading", "at", "lower", "upper", "kind", "status")]
        for row in self.rows():
            at = ", ".join(
                f"{name} {value:g}" for name, value in row.items() if name in ("prior", "fpr", "baseline", "above_fpr")
            )
            place = f"{row['index']} " if "index" in row else ""
            ends = (outward(row[end], "#.7g" if row[end] else "g", end == "upper") for end in ("lower", "upper"))
            lines.append((f"{place}{row['reading']}", at, *ends, row["kind"], row["status"]))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = ("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines)
        return "\n".join(line.rstrip() for line in text)


def risk(
    mechanism: Mechanism,
    *,
    fpr: ArrayLike = (0.01, 0.001),
    prior: ArrayLike = 0.1,
    baseline: ArrayLike = 0.01,
    above_fpr: float = 1e-10,
    relation: str = "add_or_remove_one",
    rtol: float = 1e-4,
    backend: str = "auto",
) -> RiskTable:
    """Compute what the best attack on a mechanism achieves, in the usual readings, each a certified bracket.

    * advantage: the largest TPR - FPR of a membership test, `delta(0)`.
    * true_positive_rate at each `fpr`: `min over eps of {delta(eps) + e^eps fpr}`.
    * posterior at each `prior` and `fpr`: the largest probability of membership after a positive test.
    * bayes_success at each `prior`, and its excess over the best guess without output, `max(prior, 1 - prior)`.
    * reconstruction at each `baseline`: the largest success of a reconstruction whose success without output is
      `baseline`.
    * gdp_mu and gdp_regret above the floor `above_fpr`, which is part of the claim (`Profile.gdp_mu`, `gdp_regret`).

    Parameters
    ----------
    mechanism : Mechanism
        All readings have the shape of its batch.
    fpr, prior, baseline : float or list of floats in (0, 1)
    above_fpr : float in (0, 1/2)
    relation, rtol, backend
        Options of `jaxacct.epsilon`.

    Returns
    -------
    RiskTable

    References
    ----------
    jaxacct/representations/README.md derives every reading.

    >>> import jaxacct as ja
    >>> table = ja.risk(ja.Gaussian(1.0), fpr=0.001)
    >>> round(float(table["gdp_mu"].upper), 6), round(float(table["bayes_success", 0.1].upper), 6)
    (1.0, 0.901336)
    """
    refuse_tracers("ja.risk", "jaxacct.kernels.contour", mechanism=mechanism)
    rates, priors, baselines = (
        list(dict.fromkeys(np.ravel(check(name, value, OPEN_PROBABILITY)).tolist()))
        for name, value in (("fpr", fpr), ("prior", prior), ("baseline", baseline))
    )
    check("above_fpr", above_fpr, FLOOR, "one floor serves the whole table")
    p = profile(mechanism, relation, rtol=rtol, backend=backend)
    axes = (1,) * len(batch_shape(mechanism))
    alike = np.unique([*rates, *baselines])  # the largest success of a reconstruction is a true-positive rate
    power = p.true_positive_rate(alike.reshape(-1, *axes))
    tpr = {float(rate): power[place] for place, rate in enumerate(alike)}
    readings = [Reading("advantage", {}, p.advantage())]
    readings += [Reading("true_positive_rate", {"fpr": rate}, tpr[rate]) for rate in rates]
    for chance in priors:
        for rate in rates:
            readings.append(
                Reading("posterior", {"prior": chance, "fpr": rate}, p.posterior_at(chance, rate, tpr[rate]))
            )
        success = p.bayes_success(chance)
        readings.append(Reading("bayes_success", {"prior": chance}, success))
        readings.append(Reading("bayes_excess", {"prior": chance}, p.bayes_excess(chance)))
    readings += [Reading("reconstruction", {"baseline": rate}, tpr[rate]) for rate in baselines]
    mu, regret = p.gaussian_readings(above_fpr)
    floor = {"above_fpr": float(above_fpr)}
    readings += [Reading("gdp_mu", floor, mu), Reading("gdp_regret", floor, regret)]
    return RiskTable(tuple(readings), relation)
