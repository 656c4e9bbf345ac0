"""`ja.risk`: a table of certified brackets that say how well the best attack on a mechanism's output succeeds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxacct.core import markup
from jaxacct.core.bounds import Bounds
from jaxacct.core.files import optional_package
from jaxacct.core.text import aligned, exact, outward, percent, plain_percent, unusual
from jaxacct.core.types import ArrayLike, Foreign
from jaxacct.core.validation import FLOOR, OPEN_PROBABILITY, check, check_one, refuse_tracers
from jaxacct.mechanisms import Mechanism, batch_shape
from jaxacct.representations.mechanism_profile import profile

_SENTENCES = {
    "advantage": "A test for whether {event} has a true-positive rate of at most its false-positive rate plus {upper}.",
    "true_positive_rate": "A test that is positive for {fpr} of {others} is positive for at most {upper} of {ones}.",
    "posterior": (
        "If {event} with probability {prior} beforehand, a positive test with false-positive rate {fpr} raises this to "
        "at most {upper}."
    ),
    "bayes_success": (
        "If {event} with probability {prior} beforehand, the best guess is right with probability at most {upper}; "
        "without the output it is {guess}."
    ),
    "bayes_excess": "Of that, at most {upper} are owed to the output.",
    "reconstruction": (
        "A reconstruction that succeeds with probability {baseline} without the output succeeds with probability at "
        "most {upper}."
    ),
    "gdp_mu": (
        "Where both error rates are at least {above_fpr}, no test has lower ones than the best test of a Gaussian "
        "mechanism with mu = {upper}."
    ),
    "gdp_regret": (
        "The Gaussian mechanism of gdp_mu overstates the risk: the true error rates are at most {upper} away. At 0 it "
        "states the risk exactly."
    ),
}
"""The sentence for each kind of reading. `_WORDS` and `_MEMBERSHIP` give the words `event`, `ones` and `others`."""
_WORDS = {
    "replace_one": ("the first of two given records was used", "the runs with the first", "the runs with the second"),
    "add_one": ("a record was not used", "the records that were not used", "the records that were used"),
}
_HEAD = ("reading", "at", "lower", "upper", "kind", "status")
_MEMBERSHIP = "a record was used", "the records that were used", "the records that were not used"
"""For relations not in `_WORDS`: the event that an attack detects, the cases with the event, the cases without it."""


@dataclass(frozen=True, eq=False)
class Reading:
    """One risk, computed at some rates or priors: a bracket for each configuration.

    >>> import jaxacct as ja
    >>> ja.risk(ja.Gaussian(1.0)).readings[0].name
    'advantage'
    """

    name: str
    at: dict[str, float]  # the rates or priors, such as {"fpr": 0.01}
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
        """Return the bracket of a risk. `key` is the name, or a tuple of the name and the risk's rates or priors."""
        name, *numbers = (key,) if isinstance(key, str) else key
        named = [reading for reading in self.readings if reading.name == name]
        if not named:
            raise KeyError(f"{name!r}; use one of {', '.join(dict.fromkeys(one.name for one in self.readings))}")
        for reading in named:
            if list(reading.at.values())[: len(numbers)] == [float(number) for number in numbers]:
                return reading.bounds
        raise KeyError(f"{name} at {numbers}; it was read at {[list(reading.at.values()) for reading in named]}")

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict for each risk of each configuration.

        Keys: "reading", its rates or priors, "index" (in a batch), "lower", "estimate", "upper", "kind" and "status".
        """
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
        """Return a dict with the keys "relation" and "readings". Numbers and arrays become Python numbers and lists."""
        readings = []
        for one in self.readings:
            names = ("lower", "estimate", "upper", "kind", "status")
            ends = {name: np.asarray(getattr(one.bounds, name)).tolist() for name in names}
            readings.append({"reading": one.name, **one.at, **ends})
        return {"relation": self.relation, "readings": readings}

    def explain(self, index: tuple[int, ...] = ()) -> list[str]:
        """Return a sentence for each reading of one configuration. `index` is the configuration's place in the batch.

        Each sentence states the upper end of the reading's bracket, rounded up. A sentence is a proved claim only if
        the reading's kind is "certified" or "bound".

        >>> import jaxacct as ja
        >>> ja.risk(ja.Gaussian(1.0)).explain()[0]
        'A test for whether a record was used has a true-positive rate of at most its false-positive rate plus 38.3 %.'
        """
        event, ones, others = _WORDS.get(self.relation, _MEMBERSHIP)
        found = []
        for reading in self.readings:
            value = float(reading.bounds[index].upper if index else reading.bounds.upper)
            upper = outward(value, ".4g", up=True) if reading.name == "gdp_mu" else percent(value)
            at = {name: plain_percent(number) for name, number in reading.at.items()}
            prior = reading.at.get("prior", 0.0)
            words = {"event": event, "ones": ones, "others": others, "upper": upper, "guess": ""}
            words["guess"] = plain_percent(prior, other=prior < 0.5)
            found.append(_SENTENCES[reading.name].format(**words, **at))
        return found

    def to_pandas(self) -> Foreign:
        """Return a pandas.DataFrame with a row for each dict of `rows`. The package pandas must be installed."""
        return optional_package("pandas", "a DataFrame").DataFrame(self.rows())

    def plot(self, axes: Foreign = None) -> Foreign:
        """Call `ja.plot_risks` to draw the readings that are probabilities, and return the matplotlib Axes."""
        import jaxacct  # `jaxacct.plots` imports this module, so it cannot be imported above

        return jaxacct.plot_risks(self, axes=axes)

    def _repr_html_(self) -> str:
        head, cells, rest = list(_HEAD), self._cells(), ""
        if self.readings[0].bounds.shape:
            shown, rest = markup.cut(len(cells))
            cells = [cells[place] for place in shown]
        else:
            head.append("in words")
            cells = [(*row, words) for row, words in zip(cells, self.explain(), strict=True)]
        return markup.table(f"RiskTable, {self.relation}", head, cells, rest)

    def _cells(self) -> list[tuple[str, ...]]:
        """Return the cells of each row as text. Lower ends are rounded down, and upper ends are rounded up."""
        found = []
        for row in self.rows():
            rates = [name for name in ("prior", "fpr", "baseline", "above_fpr") if name in row]
            at = ", ".join(f"{name} {exact(row[name])}" for name in rates)
            place = f"{row['index']} " if "index" in row else ""
            ends = (outward(row[end], "#.7g" if row[end] else "g", end == "upper") for end in ("lower", "upper"))
            found.append((f"{place}{row['reading']}", at, *ends, row["kind"], row["status"]))
        return found

    def __repr__(self) -> str:
        text = aligned([_HEAD, *self._cells()], left=range(len(_HEAD)))
        head = [f"RiskTable{unusual(self.relation)}"] if unusual(self.relation) else []
        return "\n".join([*head, *(line.rstrip() for line in text)])


def risk(
    mechanism: Mechanism,
    *,
    fpr: ArrayLike = (0.01, 0.001),
    prior: ArrayLike = 0.5,
    baseline: ArrayLike = 0.01,
    above_fpr: float = 1e-10,
    relation: str = "add_or_remove_one",
    rtol: float = 1e-4,
    backend: str = "auto",
) -> RiskTable:
    """Compute how well the best attack on a mechanism does. Each reading is a certified bracket.

    * advantage: the largest true-positive rate minus false-positive rate of a membership test. It equals `delta(0)`.
    * true_positive_rate at each `fpr`: the largest true-positive rate of a test with this false-positive rate. It
      equals `min over eps of {delta(eps) + e^eps fpr}`.
    * posterior at each `prior` and `fpr`: the largest probability of membership after a positive test.
    * bayes_success at each `prior`: the largest probability that a guess about membership is right.
    * bayes_excess at each `prior`: bayes_success minus its value without the output, `max(prior, 1 - prior)`.
    * reconstruction at each `baseline`: the largest success probability of a reconstruction that succeeds with
      probability `baseline` without the output; left out under ``add_one``.
    * gdp_mu: the smallest mu of Gaussian differential privacy, for tests with both error rates at least `above_fpr`.
    * gdp_regret: how far the true error rates are from those of the Gaussian mechanism of gdp_mu.

    Parameters
    ----------
    mechanism : Mechanism, whose batch shape each reading has
    fpr, prior, baseline : float or list of floats in (0, 1)
    above_fpr : float in (0, 1/2)
    relation, rtol, backend : options of `jaxacct.epsilon`

    Returns
    -------
    RiskTable

    References
    ----------
    jaxacct/representations/README.md derives every reading.

    >>> import jaxacct as ja
    >>> table = ja.risk(ja.Gaussian(1.0), fpr=0.001)
    >>> round(float(table["gdp_mu"].upper), 6), round(float(table["bayes_success", 0.5].upper), 6)
    (1.0, 0.691462)
    """
    refuse_tracers("ja.risk", "jaxacct.kernels.contour", mechanism=mechanism)
    rates, priors, baselines = (
        list(dict.fromkeys(np.ravel(check(name, value, OPEN_PROBABILITY)).tolist()))
        for name, value in (("fpr", fpr), ("prior", prior), ("baseline", baseline))
    )
    check_one("above_fpr", above_fpr, FLOOR, "one floor serves the whole table")
    p = profile(mechanism, relation, rtol=rtol, backend=backend)
    axes = (1,) * len(batch_shape(mechanism))
    # the largest success of a reconstruction with baseline b is the largest true-positive rate at fpr = b
    alike, present = np.unique([*rates, *baselines]), p.of_presence()
    power = present.true_positive_rate(alike.reshape(-1, *axes))
    tpr = {float(rate): power[place] for place, rate in enumerate(alike)}
    readings = [Reading("advantage", {}, p.advantage())]
    either = tpr if present is p else {rate: p.true_positive_rate(rate) for rate in rates}
    readings += [Reading("true_positive_rate", {"fpr": rate}, either[rate]) for rate in rates]
    for chance in priors:
        for rate in rates:
            posterior = present.posterior_at(chance, rate, tpr[rate])
            readings.append(Reading("posterior", {"prior": chance, "fpr": rate}, posterior))
        readings.append(Reading("bayes_success", {"prior": chance}, p.bayes_success(chance)))
        readings.append(Reading("bayes_excess", {"prior": chance}, p.bayes_excess(chance)))
    if relation != "add_one":  # which does not take the record out
        readings += [Reading("reconstruction", {"baseline": rate}, tpr[rate]) for rate in baselines]
    mu, regret = p.gaussian_readings(above_fpr)
    floor = {"above_fpr": float(above_fpr)}
    readings += [Reading("gdp_mu", floor, mu), Reading("gdp_regret", floor, regret)]
    return RiskTable(tuple(readings), relation)
