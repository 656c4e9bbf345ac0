"""The sentences of a report: relations, claims, assumptions, risks, and the limits of a claim."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from typing import Any

from jaxacct.core.text import percent, plain_percent
from jaxacct.mechanisms import MatrixMechanism, Mechanism
from jaxacct.report.claim import Claim, up
from jaxacct.report.readings import FALSE_POSITIVE_RATES, Readings

RELATIONS = {
    "add_or_remove_one": "add or remove one record: two data sets are neighbours if one of them is the other with one "
    "record more",
    "add_one": "add one record: only from a data set to the same one with one record more. The other direction is not "
    "covered",
    "remove_one": "remove one record: only from a data set to the same one with one record less. The other direction "
    "is not covered",
    "replace_one": "replace one record: two data sets of the same size are neighbours if they differ in one record",
    "zero_out": "zero out one record: two data sets are neighbours if they differ in one record, whose contribution is "
    "zero in one of them. The number of records is the same in both and may be known",
}
UNIT = {
    "record": "One record of the data set: whatever the run sampled and clipped as one example.",
    "user": "One user: all examples of a user together, which the run sampled and clipped as one.",
}
LIMITS = (
    "It does not say that nothing can be learnt about a person. What the data as a whole show can be true of somebody "
    "whose data were never used.",
    "It covers the outputs listed on this page, and nothing else. A training loss, validation scores on private data, "
    "counts of clipped gradients, logs, running times and earlier releases from the same data are not covered.",
    "It does not compose by itself. Another release from the same data needs an account of both together.",
    "It does not say that the program did what was noted. jaxacct accounts for the noise and the sampling that the "
    "file states.",
    "Epsilon and delta are upper bounds on what any attacker can do. They do not measure what a known attack achieves.",
)
SECRECY = (
    "The random keys and the noise stay secret, and the noise has the stated law to anybody else. Whoever has the keys "
    "can take the noise away."
)
TRAINING = (
    "The gradient of every record is clipped before noise is added, so that one record moves the sum by at most the "
    "clip norm. The noise multiplier is relative to that norm. First parameters do not come from the private data.",
    f"{SECRECY} The sampled batches stay secret, too. Checkpoints of the trainer hold the keys.",
)
USERS = (
    "All examples of a user are drawn together, and the gradient of their mean is clipped as one. The user of each "
    "example was stated correctly."
)
TURNS = (
    "groups of records take turns: step i draws records of group i mod {groups} alone. The group of a record does not "
    "depend on other records."
)
"""The assumption about a run in which groups take turns; a page puts "In the plan" or "In the run ..." before it."""
CYCLIC = (
    f"In runs with cyclic_poisson {TURNS.format(groups='groups')} The noise is that of a strategy with at most the "
    "stated number of bands, whose columns have norm at most 1."
)
"""The assumption about a sweep's result with a column "bands"."""
ONE_ORDER = (
    "all passes have one order: any two steps of a record lie at least {batches} steps apart, and no record moves to "
    "another step."
)
"""The assumption about a run in a fixed order; a page puts the same words before it as before `TURNS`."""
SHARED_NOISE = (
    "the noise is correlated: the noise of step i is row i of C^-1 Z, where C is the matrix of the stated strategy, "
    "{strategy}, and the entries of Z are independent."
)
"""The assumption about a run with correlated noise; a page puts the same words before it as before `TURNS`."""
GENERAL = (
    "The mechanism adds noise to a statistic. One record moves the statistic by at most the sensitivity to which the "
    "noise is relative.",
    SECRECY,
)
"""The assumptions about a mechanism that is reported by itself, without a plan or a ledger."""
_ALIKE = (
    "K is drawn from the stated law, is independent of the data, and stays secret, as do the other candidates and the "
    "running time. The candidates are i.i.d. given the data: each configuration is drawn afresh from one law, and run "
    "with fresh randomness. A list tried in order, pruning, warm starts and Bayesian optimisation are not. The score "
    "is a function of the candidate's own private output."
)
TUNED = (
    "Where a tuning is noted as points of its profile, its number of candidates, the candidates that are not released, "
    "the sample of a tuning on a subset and the running time stay secret. Its candidates are i.i.d. unless the note "
    "says adaptive. A record of private validation data is in no training data."
)
"""The assumption about tunings whose releases are noted as a `PrivacyProfile`."""
ANSWERS = (
    "of the early stop only its answers are released. Scores stay secret, and a record is among the validation records "
    "at most once."
)
"""The assumption about an early stop; a page puts the same words before it as before `TURNS`."""
_STAY = "A record that is added or taken out moves no other record to another step or group."
_OF_CLASS = {
    "PoissonSampled": "Batches are Poisson samples: in every step each record takes part independently, with the "
    "stated probability. If this page says that groups take turns, it is the records of the group in turn that take "
    "part so. Shuffled batches, or batches of a fixed size, are not covered by this.",
    "RandomAllocation": "The steps are in rounds. In every round each record takes part in as many steps as stated, "
    "drawn for it afresh, uniformly and independently of all other records. Bins of equal size, as by shuffling, are "
    "not covered by this.",
    "TruncatedPoissonSampled": "Batches are Poisson samples. Of one that is larger than the cap a uniformly random "
    "subset of that size is kept, and how large it was stays secret. The number of records is the stated one (the "
    "larger of two neighbours), and is public.",
    "SampledWithReplacement": "Every draw of a batch is uniform over all records, independent of the other draws. A "
    "record that is drawn several times counts as often, clipped each time.",
    "SampledWithoutReplacement": "Every batch is drawn afresh, all batches of its size being equally likely.",
    "ShuffledBatches": "The batches of a pass are disjoint, and which record is in which does not depend on what the "
    "records hold. A record that is zeroed keeps its place, so that no other record changes its batch.",
    "MatrixMechanism": "The noise is correlated: the release is C X + Z. C is the stated strategy, row i of X is the "
    "sum of the clipped gradients of step i, and the entries of Z are independent.",
    "SingleParticipation": f"A record takes part in at most one step. {_STAY}",
    "FixedEpochs": f"A record takes part once in every pass over the data, each time at the same place. {_STAY}",
    "MinSeparation": "Any two steps of a record lie at least as far apart as stated. Where a largest number of steps "
    f"is stated, no record takes part in more. {_STAY}",
    "CyclicPoisson": "Groups of records take turns: step i draws every record of group i mod groups independently, "
    f"with the stated probability, and no other. {_STAY}",
    "BallsInBins": "Every record is in one bin, drawn uniformly once and independently of all other records, and kept "
    f"secret. It takes part in the steps of its bin, the same in every epoch. {_STAY}",
    "Selection": f"Only the best of K candidates is released. {_ALIKE}",
    "TopSelection": f"Of K candidates only the best are released, as many as stated. {_ALIKE}",
    "AdaptiveSelection": "K candidates are run, K drawn from the stated law. K is independent of the data and stays "
    "secret. A candidate may depend on the outputs before it in any way.",
    "PrivacyProfile": "The stated points of the privacy profile hold for the mechanism that they stand for.",
    "ZCDP": "The stated zero-concentrated guarantee holds for the mechanism that it stands for.",
    "AboveThreshold": "One record moves every query by at most the sensitivity to which the noise is relative.",
    "PureDP": "The stated epsilon holds for the mechanism that it stands for.",
    "ApproximateDP": "The stated epsilon and delta hold for the mechanism that they stand for.",
}
"""For each class of mechanism, the assumption that a page states if one of its mechanisms has this class."""
FILTER_NOTE = "The second program checks the composition of the releases. It does not check the Renyi filter."
CHOICE_NOTE = "The second program does not cover private choices. It leaves them undecided."


def about(unit: str, text: str) -> str:
    """Replace the word "record" by the unit, in a sentence of this package (not in a text from a file)."""
    return text.replace("record", unit)


def of_group(group: int, text: str) -> str:
    """Replace each record by a group of up to `group` records, in a sentence of this package about one record."""
    if group == 1:
        return text
    return re.sub(r"(?<!number of )\brecord(s?)\b", rf"group\1 of up to {group:,} records", text)


def unit_of(unit: str, group: int) -> str:
    """Return what is protected: one unit, or a group of them."""
    return UNIT[unit] + (f" Up to {group:,} of them are protected together." if group > 1 else "")


def limits(groups: Collection[int]) -> list[str]:
    """Return what claims do not say.  `groups` has the numbers of records that they cover together."""
    if len(groups) > 1:
        persons = (
            "No claim says anything about a person who counts as more records than its neighbouring relation names. "
            "Such a person has a weaker guarantee."
        )
    elif max(groups) > 1:
        persons = (
            f"It says nothing about a person who counts as more than {max(groups):,} records. Such a person has a "
            "weaker guarantee."
        )
    else:
        persons = (
            "It says nothing about a person who counts as several records. Such a person has a weaker guarantee than "
            "one record has."
        )
    return [persons, *LIMITS]


def mechanisms_in(mechanism: Mechanism) -> Iterable[Mechanism]:
    """Yield a mechanism and the mechanisms inside it, except for those inside a matrix mechanism."""
    yield mechanism
    for one in () if isinstance(mechanism, MatrixMechanism) else mechanism.inside():
        yield from mechanisms_in(one)


def assumptions(
    mechanisms: Iterable[Mechanism], kinds: Iterable[str], own: Iterable[str], unit: str = "record"
) -> list[str]:
    """Return the `own` assumptions of a subject, those of its `mechanisms`, and those of the `kinds` of its answers."""
    parts: list[Any] = [one for mechanism in mechanisms for one in mechanisms_in(mechanism)]
    parts += [one.participation for one in parts if isinstance(one, MatrixMechanism)]
    names = {type(one).__name__ for one in parts}
    found = [*own, *(about(unit, text) for name, text in _OF_CLASS.items() if name in names)]
    for kind in dict.fromkeys(kinds):
        if kind.startswith("conditional"):
            found.append(f"The answer is {kind}. It holds under that assumption only.")
        elif kind == "bound":
            found.append("The answer is a theorem's upper bound. The true epsilon may be smaller.")
    return found


def figure(claim: Claim) -> str:
    """Return the claim as a formula, or "Not to be claimed"."""
    if not claim.may_be_claimed:
        return "Not to be claimed"
    if claim.quantity == "delta":
        return f"delta <= {up(claim.upper, 6)} at epsilon = {claim.given!r}"
    return f"epsilon <= {up(claim.upper, 6)} at delta = {claim.given!r}"


_GROWN = "the probability of any result would be at most {times} times as large"
_CHANGE = {
    "add_or_remove_one": f"If one record were added or taken out, {_GROWN}",
    "replace_one": f"If one record were replaced by another, {_GROWN}",
    "zero_out": f"If the contribution of one record were set to zero, or no longer were, {_GROWN}",
    "add_one": "The probability of any result without a record is at most {times} times what it is with that record",
    "remove_one": "The probability of any result with a record is at most {times} times what it is without that record",
}
"""For each relation, a sentence on the probabilities of a result under neighbouring data sets."""


def in_words(claim: Claim) -> str:
    """Return the claim as sentences, or the reason why nothing may be claimed."""
    if not claim.may_be_claimed:
        status = f" The status is “{claim.status}”." if claim.status else ""
        return f"Nothing may be claimed of this.{status} {claim.obstacle}"
    epsilon = claim.given if claim.quantity == "delta" else claim.upper
    given = repr(claim.given).removesuffix(".0")
    shown = {"epsilon": given, "delta": given, claim.quantity: up(claim.upper, 6)}
    # 1e-15 covers the relative error of exp. From 700 on, e^epsilon stays a formula, because exp overflows at 709.
    times = up(math.exp(epsilon) * (1.0 + 1e-15), 4) if epsilon < 700.0 else f"e^{up(epsilon, 6)}"
    change = _CHANGE.get(claim.relation, _CHANGE["add_or_remove_one"]).format(times=times if epsilon else "1")
    would = "is" if claim.happened else "would be"
    only = " in one direction only" if claim.relation in ("add_one", "remove_one") else ""
    private = f"({shown['epsilon']}, {shown['delta']})-differentially private{only}"
    return f"What {would} released is {private}. {of_group(claim.group, change)}, plus {shown['delta']}."


_TELLS = {
    "replace_one": (
        "An attacker who tells two given records apart, and wrongly names the first one in 1 of {n} cases, rightly "
        "names it in at most {rate} of the cases where it was used",
        "the first one to be used",
        "which of the two records was used, the first with probability {prior} beforehand,",
    ),
    "add_one": (
        "An attacker who wrongly clears 1 in {n} of the records that were used, rightly clears at most {rate} of the "
        "records that were not",
        "a record not to be used",
        "whether a record was used, which it was with probability {prior} beforehand,",
    ),
}
"""For a relation: a text on the true-positive rate, what has probability `prior`, and what the attacker has to tell."""
_ACCUSES = (
    "An attacker who falsely accuses 1 in {n} of the records that were not used, rightly accuses at most {rate} of the "
    "records that were",
    "a record to be used",
    "whether a record was used, which it was with probability {prior} beforehand,",
)
"""The texts for all other relations."""


def risks(readings: Readings, relation: str, group: int = 1) -> list[str]:
    """Return the readings as sentences; each figure is the upper end of its bracket, rounded up."""
    sentence, belief, what = _TELLS.get(relation, _ACCUSES)
    prior, found = plain_percent(readings.prior), []
    for place, fpr in enumerate(FALSE_POSITIVE_RATES):
        rate = sentence.format(n=f"{round(1 / fpr):,}", rate=percent(readings.rate(fpr)))
        right = percent(float(readings.posterior.upper[place]))
        found.append(
            f"{rate}. Without the output it is {plain_percent(fpr)}. If the attacker took {belief} with probability "
            f"{prior} beforehand, each such statement is right with probability at most {right}."
        )
    guess = plain_percent(readings.prior, other=readings.prior < 0.5)
    found.append(
        f"An attacker who has to tell {what.format(prior=prior)} is right with probability at most "
        f"{percent(float(readings.bayes_success.upper))}. Without the output it is {guess}."
    )
    found.append(
        "The membership advantage, which is the true-positive rate less the false-positive rate, is at most "
        f"{percent(float(readings.advantage.upper))} for every attacker. 0 % is no leak, 100 % is certainty."
    )
    return [of_group(group, text) for text in found]
