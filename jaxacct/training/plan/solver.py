"""Checks requests for plans, and solves them: finds the segments, noise and filter with which a plan meets its target.

The noise, the number of steps, or the sampling probability may be left open.  Every search returns only a value that
a certified engine evaluated (calibration/search.py).  Steps compose exactly, or through a Renyi filter [Feldman and
Zrnic 2021], which must be fixed before the first step (README.md, "Recalibration").
"""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np

from jaxacct.accounting import account
from jaxacct.calibration.dp_sgd_search import MAX_STEPS, RATE_RANGE, gaussian_mu
from jaxacct.calibration.noise_rate_steps import calibrate_noise_multiplier, law_shape
from jaxacct.calibration.search import least_private
from jaxacct.core.bounds import Bounds, explain, in_order
from jaxacct.core.validation import COUNT, DELTA, POSITIVE, Constraint, InputError, check, check_one, choice
from jaxacct.mechanisms import RELATIONS, Mechanism, cap_for, compose, dp_sgd, repeat
from jaxacct.mechanisms.dp_sgd_run import NOISE_RANGE, NUMBERS, SAME, nearest_slots, usual_relation
from jaxacct.representations.renyi_divergences import ORDERS, epsilon_from_renyi, renyi_curve
from jaxacct.selection.law_of_k import Law
from jaxacct.strategies.matrices import Identity
from jaxacct.strategies.strategy import MinSeparation, SingleParticipation, Strategy
from jaxacct.training.plan.early_stop import EarlyStop, with_early_stop
from jaxacct.training.plan.segments import (
    ROUNDING,
    Piece,
    Schedule,
    Segment,
    joined,
    merged,
    pieces,
    releases,
    scaled,
    slots_for,
    steps_of,
    with_rates,
)
from jaxacct.training.step import step_mechanisms as rules
from jaxacct.training.step.step_mechanisms import Release, composed, prefixes, single

DISPLACING = ("add_or_remove_one", "add_one", "remove_one")
"""Relations that fixed batches refuse: a record added or removed moves another record to another batch."""
SIZE = Constraint("use a whole number of records or of slots", 1, 10**9, integral=True)
"""Range of `slots`, `cap` and `groups`. It is finite because the sampler counts in 32 bits."""
_RULES = {"target_epsilon": POSITIVE, "target_delta": DELTA, "expected_batch_size": POSITIVE}
_RULES |= NUMBERS | dict.fromkeys(("slots", "cap", "groups"), SIZE)
"""Names of the numbers that a caller may give, each with the values that it may have."""
_RATES = ("sampling_probability", "expected_batch_size", "sampling_rates", "batch_schedule", "slots")
_OPEN = {"noise_multiplier": ("noise_multiplier",), "steps": ("steps", "epochs"), "sampling_probability": _RATES}
"""For each setting that the solver can find, the arguments by which a caller can give it instead."""


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """Arguments of a `Plan` as `checked` returns them, for the solver.  An argument left out is None."""

    target_epsilon: float | None
    target_delta: float
    dataset_size: int
    sampling_probability: float | None
    expected_batch_size: float | None
    noise_multiplier: float | None
    steps: int | None
    epochs: float | None
    sampling: str
    relation: str
    noise_schedule: Schedule | None
    batch_schedule: Schedule | None
    repetitions: Law | None
    data_dependent: bool
    candidates: str
    slots: int | None
    cap: int | None
    unit: str
    noise: Strategy | None
    groups: int | None
    early_stop: EarlyStop | None
    sampling_rates: np.ndarray | None = field(repr=False)
    rates_digest: str | None = field(repr=False)


_OWN = {"sampling": rules.POISSON, "data_dependent": False, "candidates": "iid", "unit": "record"}
DEFAULTS: dict[str, Any] = dict.fromkeys(each.name for each in fields(PlanRequest)) | _OWN
"""Default of each setting, as in the signature of `Plan`."""


def checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a plan, with all numbers as Python numbers; refuse settings that no plan can have."""
    found = dict(settings)
    if SAME[rules.FIXED] == found["sampling"]:  # plans and ledgers write "fixed_batches" for "shuffled"
        found["sampling"] = rules.FIXED
    choice("sampling", found["sampling"], rules.SAMPLING)
    if found["relation"] is None:
        found["relation"] = usual_relation(rules.FIXED if found["sampling"] == rules.ORDER else found["sampling"])
    choice("relation", found["relation"], RELATIONS)
    choice("candidates", found["candidates"], ("iid", "adaptive"))
    choice("unit", found["unit"], ("record", "user"))
    for name, way in (("slots", rules.ALLOCATION), ("cap", rules.TRUNCATED), ("groups", rules.CYCLIC)):
        if found[name] is not None and found["sampling"] != way:
            raise InputError(f"{name} = {found[name]!r:.40} needs sampling = {way!r}, found {found['sampling']!r}")
    if told := why_not(found["sampling"], found["relation"]):
        raise InputError(told)
    for name, rule in _RULES.items():
        if found.get(name) is not None:
            found[name] = check_one(name, found[name], rule, "a plan is for one run")
    if found["sampling"] in rules.WITH_NOISE:
        found |= _correlated(found)
    elif found["noise"] is not None:
        raise InputError(
            f"noise = {found['noise']!r:.60} needs sampling = {' or '.join(map(repr, rules.WITH_NOISE))}, found "
            f"{found['sampling']!r}, by which the steps of a record are not known to be apart"
        )
    if found["repetitions"] is not None and law_shape(found["repetitions"], "iid"):
        raise InputError("repetitions must be one law of K, not a batch; a plan is for one run")
    if not isinstance(found["data_dependent"], bool):
        raise InputError(f"data_dependent = {found['data_dependent']!r:.40} must be True or False")
    if found["data_dependent"] and found["repetitions"] is not None:
        raise InputError("data_dependent = True with repetitions: the K runs of a tuning must all be the same; drop it")
    if found["data_dependent"] and found["sampling"] in (rules.ALLOCATION, rules.TRUNCATED, *rules.WITH_NOISE):
        raise InputError(
            f"data_dependent = True is not supported with sampling = {found['sampling']!r}, whose steps no finite "
            "Renyi divergence is known for; fix the steps and their noise in advance"
        )
    if found["early_stop"] is not None:
        _check_early_stop(found)
    if found["sampling_rates"] is not None or found["rates_digest"] is not None:
        found |= _rates(found)
    return found


def _rates(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked rates of the records and their digest; refuse rates that cannot be accounted for."""
    for name, usual in (("sampling", rules.POISSON), ("data_dependent", False)):
        if found[name] != usual:
            raise InputError(f"sampling_rates needs {name} = {usual!r}, found {found[name]!r}; leave one of them out")
    given, size = found["sampling_rates"], found["dataset_size"]
    if given is None:
        if not isinstance(found["rates_digest"], str) or not re.fullmatch("[0-9a-f]{64}", found["rates_digest"]):
            raise InputError(f"rates_digest = {found['rates_digest']!r:.40} must be 64 hexadecimal digits")
        return {}
    positive = Constraint("use a rate above 0 and at most 1", 0, 1, lower_open=True)
    rates = np.array(check("sampling_rates", given, positive), "<f8")
    if rates.shape != (size,):
        raise InputError(
            f"sampling_rates has shape {rates.shape}, must be ({size},), one rate for each of dataset_size = {size}; "
            "give sampling_probability if all have one rate"
        )
    rates.flags.writeable = False
    return {"sampling_rates": rates, "rates_digest": hashlib.sha256(rates.tobytes()).hexdigest()}


def rate_and_batch(rates: np.ndarray) -> tuple[float, float]:
    """Return the sampling probability and the expected batch size of a plan: the largest rate, and the sum of rates."""
    return float(rates.max()), math.fsum(rates.tolist())


def _check_early_stop(found: Mapping[str, Any]) -> None:
    """Refuse settings that the accounting of an early stop does not cover."""
    rule, target = found["early_stop"], found["target_epsilon"]
    if not isinstance(rule, EarlyStop):
        raise InputError(
            f"early_stop = {rule!r:.40} must be an EarlyStop; use training.EarlyStop(epsilon=.2, every=50)"
        )
    for name, usual in (("repetitions", None), ("data_dependent", False), ("unit", "record")):
        if found[name] != usual:
            raise InputError(f"early_stop has no accounting with {name} = {found[name]!r:.40}; leave one of them out")
    if target is not None and rule.epsilon >= target:
        raise InputError(f"early_stop spends {rule.epsilon!r} of target_epsilon = {target!r}; give it a small part")


def why_not(sampling: str, relation: str) -> str:
    """Return why plans with this batch rule cannot have this relation; "" if they can."""
    if sampling in (rules.POISSON, rules.CYCLIC) and relation == "replace_one":
        return (
            f"relation = 'replace_one' is not a relation of plans with sampling = {sampling!r}; give noise_multiplier, "
            "and ask ja.epsilon(plan.mechanism, delta, relation='replace_one'), which is larger"
        )
    if sampling in rules.UNSAMPLED and relation in DISPLACING:
        return (
            f"relation = {relation!r} does not hold with sampling = {sampling!r}, where one record more moves another "
            f"to another batch; account for {rules.INSTEAD[sampling]}"
        )
    return ""


def unit_of_noise(strategy: Strategy, sampling: str, batches: int) -> float:
    """Return the unit of a plan's noise multiplier: the strategy's sensitivity, in clip norms and rounded up."""
    apart = MinSeparation(batches) if sampling == rules.ORDER else SingleParticipation()
    return float(strategy.sensitivity(apart).upper)


def _correlated(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the strategy, and the number of groups of cyclic Poisson sampling; refuse settings without accounting."""
    strategy = Identity() if found["noise"] is None else found["noise"]
    if not isinstance(strategy, Strategy):
        raise InputError(
            f"noise = {strategy!r:.40} is no strategy; use strategies.Banded(bands=8), say, and noise_multiplier for "
            "the size of the noise"
        )
    groups = found["groups"]
    if groups is None and found["sampling"] == rules.CYCLIC:
        groups = getattr(strategy, "bands", None)
        if groups is None:
            raise InputError(f"groups is missing, and all columns of {type(strategy).__name__} overlap; use Banded")
    if found["batch_schedule"] is not None:
        raise InputError("batch_schedule moves records between steps that share noise; give batch_size instead")
    return {"noise": strategy, "groups": groups}


class Filter(NamedTuple):
    """Rényi filter [Feldman and Zrnic 2021]: at order `order`, no more Rényi divergence than `budget` is ever spent."""

    order: float
    budget: float

    def epsilon(self, delta: float) -> float:
        """Return the epsilon that the filter promises at delta."""
        return float(epsilon_from_renyi([self.order], [self.budget], delta).upper)


class Solution(NamedTuple):
    """Solution of a request."""

    segments: tuple[Segment, ...]
    noise_multiplier: float  # the scale of the run's noise
    filter: Filter | None = None  # for a plan whose changes may depend on the data
    epsilon: Bounds | None = None  # epsilon of the whole tuning, if known; to compute it anew takes half a minute
    cap: int | None = None  # the largest batch of truncated Poisson sampling


# Epsilon of a run: by exact composition, or through the plan's filter


def epsilon_of_run(terms: PlanRequest, mechanism: Mechanism) -> Bounds:
    """Return epsilon at the target delta of one run, or of each run of a batch, by exact composition."""
    rtol = 0.2 * _tolerance(terms.target_epsilon or 1.0)  # well below the search's tolerance
    if terms.sampling == rules.ALLOCATION:
        rtol = max(rtol, 1e-4)  # for a round, even a fine lattice leaves a relative width of some 4e-4
    return account.epsilon(mechanism, terms.target_delta, relation=terms.relation, rtol=rtol)


def epsilon_of_several(terms: PlanRequest, counts: Sequence[Mapping[Release, int]], rtol: float) -> Bounds:
    """Return epsilon at the target delta of several collections of releases, in few calls of the accountant."""
    places: dict[frozenset[Release], list[int]] = {}
    for place, each in enumerate(counts):
        kinds = frozenset(each) if terms.sampling in rules.BY_PASS else frozenset()
        places.setdefault(kinds, []).append(place)
    runs = lambda group: with_early_stop(prefixes([counts[i] for i in group]), terms.early_stop)
    accuracy: dict[str, Any] = {"relation": terms.relation, "rtol": rtol}
    return in_order(
        [(group, account.epsilon(runs(group), terms.target_delta, **accuracy)) for group in places.values()]
    )


def spent_renyi(mechanism: Mechanism, chosen: Filter, relation: str) -> np.ndarray:
    """Return the Rényi divergence that a mechanism takes from a filter's budget."""
    return np.asarray(renyi_curve(mechanism, [chosen.order], relation).values[0])


def _filters(mechanism: Mechanism, terms: PlanRequest) -> tuple[np.ndarray, np.ndarray]:
    """Return each run's Rényi divergence at each of `ORDERS`, and the epsilon it implies; shapes (orders, runs)."""
    # the factor covers rounding: the same steps summed in another order give another sum
    used = np.asarray(renyi_curve(mechanism, ORDERS, terms.relation).values) * (1.0 + 1e-10)
    pairs = zip(ORDERS, used, strict=True)
    promised = [epsilon_from_renyi([order], np.asarray(one)[None], terms.target_delta).upper for order, one in pairs]
    return used, np.stack(promised)


def _upper_epsilon(terms: PlanRequest, mechanism: Mechanism) -> np.ndarray:
    """Return the upper bound of epsilon that a plan claims for each run of a batch, by composition or by a filter."""
    if terms.data_dependent:
        return np.min(_filters(mechanism, terms)[1], axis=0)
    return np.asarray(epsilon_of_run(terms, with_early_stop(mechanism, terms.early_stop)).upper)


def solve(request: PlanRequest) -> Solution:
    """Solve for the settings that a request leaves open."""
    solution = _solved(request)
    if not request.data_dependent:
        return solution
    used, promised = _filters(composed(_releases(request, solution.segments)), request)
    best = int(np.argmin(promised))
    if not np.isfinite(used[best]):
        raise InputError("data_dependent = True: no Renyi divergence of the plan is finite; use more noise")
    return solution._replace(filter=Filter(float(ORDERS[best]), float(used[best])))


def _releases(terms: PlanRequest, segments: Sequence[Segment]) -> Counter[Release]:
    """Count the releases of all steps of some segments."""
    end = segments[-1].end if segments else 0
    return releases(segments, end, terms.sampling, terms.dataset_size, cap=terms.cap or 0)


def noise_for(
    terms: PlanRequest, spent: tuple[Segment, ...], rest: tuple[Segment, ...], start: float | None = None
) -> float:
    """Return the smallest factor on the noise of `rest` with which `spent`, followed by `rest`, meets the target."""
    target = _target(terms)
    upper = lambda scales: _upper_epsilon(terms, _together(terms, spent, rest, scales))
    if start is None:
        steps = math.fsum(s.steps for s in rest)
        drawn = math.fsum(s.steps * s.sampling_probability for s in rest)
        rate = 1.0 if terms.sampling in rules.UNSAMPLED else drawn / steps
        if terms.sampling in (*rules.UNSAMPLED, rules.CYCLIC):
            steps = sum(_releases(terms, rest).values())
        mu = float(gaussian_mu(np.array([target]), np.array([terms.target_delta]))[0])
        start = float(np.log1p(mu**2 / (rate**2 * steps)) ** -0.5)
    found = _searched(upper, target, start, NOISE_RANGE, falls=True)
    if math.isnan(found):
        raise _infeasible(target, "infeasible_noise")
    if found == NOISE_RANGE[0]:
        _warn_not_reached(target, "noise_multiplier", found, float(upper(np.array([found]))[0]))
    return found


def noise_in_filter(
    chosen: Filter, terms: PlanRequest, spent: tuple[Segment, ...], rest: tuple[Segment, ...], start: float
) -> float:
    """Return the smallest factor on the noise of `rest` with which `spent`, followed by `rest`, fits the filter."""
    step = spent[-1].end if spent else 0
    left = chosen.budget * (1.0 - 1e-9)
    if spent and not spent_renyi(composed(_releases(terms, spent)), chosen, terms.relation) < left:
        raise InputError(f"step = {step}: nothing is left of the Renyi filter, which holds the plan's use; stop")
    used = lambda scales: spent_renyi(_together(terms, spent, rest, scales), chosen, terms.relation)
    found = _searched(used, chosen.budget, start, NOISE_RANGE, falls=True)  # the budget is the target here
    if math.isnan(found):
        raise InputError(f"step = {step}: {explain('infeasible_noise')}")
    return found


def _together(terms: PlanRequest, spent: Sequence[Segment], rest: Sequence[Segment], scales: np.ndarray) -> Mechanism:
    """Return a batch of mechanisms, one for each scale: `spent`, then `rest` with its noise multiplied by the scale."""
    if terms.sampling in (*rules.UNSAMPLED, rules.CYCLIC):  # a pass may begin in one segment and end in another
        whole = [merged([*spent, *scaled(rest, float(scale))]) for scale in scales]
        return prefixes([_releases(terms, segments) for segments in whole])
    parts = []
    for segments, factor in ((spent, np.ones_like(scales)), (rest, scales)):
        for release, count in _releases(terms, segments).items():
            noise = release.noise_multiplier * factor
            parts.append(repeat(single(release.sampling, noise, *release[2:]), count))
    return parts[0] if len(parts) == 1 else compose(*parts)


def _solved(request: PlanRequest) -> Solution:
    """Solve a request, except for its filter."""
    # `ja.calibrate_noise_multiplier` finds the noise of Poisson sampling at one rate and one noise multiplier; the
    # noise of all other runs is searched along the segments.
    scheduled = request.noise_schedule is not None or request.batch_schedule is not None
    plain = request.sampling == rules.POISSON and not scheduled and not request.data_dependent
    plain = plain and request.early_stop is None
    opened = _left_open(request, plain)
    n = float(request.dataset_size)
    given = request.noise_schedule
    noise = [Piece(None, 1.0)] if given is None else pieces("noise_schedule", given)
    if opened == "sampling_probability":
        return _with_rate(request, n)
    batches = _batches(request, n)
    rate = batches[0].value / n
    if request.sampling_rates is not None:  # the plan claims the epsilon of the largest rate
        rate = rate_and_batch(request.sampling_rates)[0]
        request = replace(request, sampling_probability=rate)
    if opened == "steps":
        if request.sampling == rules.TRUNCATED:
            # the cap needs a number of steps, which is not known yet: a million is more than most runs have
            request = replace(request, cap=_cap_of(request, rate, 10**6))
        steps = _most_steps(request, rate, n)
    elif request.steps:
        steps = request.steps
    else:
        assert request.epochs is not None
        steps = steps_of(batches, request.epochs * n)
    segments = with_rates(joined(noise, batches, steps, int(n)), request.sampling, request.groups, int(n))
    if request.sampling not in (rules.ALLOCATION, *rules.OF_ONE_SIZE) and request.sampling_probability is not None:
        rate = request.sampling_probability  # keep the given rate: the batch size gives a rounded one
        segments = tuple(s._replace(sampling_probability=rate) for s in segments)
    if request.sampling == rules.TRUNCATED:
        request = replace(request, cap=_cap_of(request, max(s.sampling_probability for s in segments), steps))
    scale, epsilon = request.noise_multiplier, None
    if scale is None and plain:
        scale, epsilon = _calibrated_noise(request, segments[0])
    elif scale is None:
        scale = noise_for(request, (), segments)
    return Solution(scaled(segments, scale), scale, epsilon=epsilon, cap=request.cap)


def _left_open(request: PlanRequest, plain: bool) -> str | None:
    """Return the one setting to solve for, or None.  Refuse too many or too few settings, and unsolvable requests."""
    given = {key: [n for n in names if getattr(request, n) is not None] for key, names in _OPEN.items()}
    for names in given.values():
        if len(names) > 1:
            raise InputError(f"{names[0]} and {names[1]} are both given; give one of them")
    opened = [key for key, names in given.items() if not names]
    words = " and ".join(" or ".join(_OPEN[key][:2]) for key in opened)
    if request.target_epsilon is None:
        if opened:
            raise InputError(f"{words} is left open without a target_epsilon to solve it for; give it, or the target")
        return None
    if not opened:
        raise InputError(
            "target_epsilon is given and nothing is left open; leave out noise_multiplier, steps or the batch "
            "size, or leave out target_epsilon to have epsilon reported"
        )
    if len(opened) > 1:
        raise InputError(f"{words} are left open; one can be solved for, give the others")
    if opened[0] != "noise_multiplier":
        for name in ("noise_schedule", "batch_schedule", "repetitions"):
            if getattr(request, name) is not None:
                raise InputError(f"{name} is given, so only noise_multiplier can be left open; give {words}")
    elif request.repetitions is not None and not plain:
        raise InputError(
            "repetitions with a target need sampling = 'poisson' and no schedule; give noise_multiplier and leave "
            "out target_epsilon to have epsilon reported"
        )
    return opened[0]


def _batches(request: PlanRequest, n: float) -> list[Piece]:
    """Return the expected batch sizes, as pieces; refuse sizes that do not fit the data."""
    if request.batch_schedule is not None:
        found = pieces("batch_schedule", request.batch_schedule)
    elif request.expected_batch_size is not None:
        found = [Piece(None, request.expected_batch_size)]
    elif request.sampling_rates is not None:
        found = [Piece(None, rate_and_batch(request.sampling_rates)[1])]
    elif request.slots is not None:
        found = [Piece(None, n / request.slots)]
    else:
        assert request.sampling_probability is not None
        found = [Piece(None, request.sampling_probability * n / (request.groups or 1))]
        if found[0].value == 0.0:
            raise InputError("sampling_probability = 0.0 must be > 0 in a plan; use a positive one")
    name = "batch_schedule" if request.batch_schedule is not None else "expected_batch_size"
    for _, size in found:
        if size > n:
            raise InputError(f"{name} = {size:g} must be <= dataset_size = {n:g}; use smaller batches")
        if request.groups and size * request.groups > n * (1.0 + ROUNDING):
            raise InputError(
                f"{name} = {size:g} must be <= {n / request.groups:g}, the records of one of groups = "
                f"{request.groups}; use smaller batches, or fewer groups and bands"
            )
        if request.sampling in rules.OF_ONE_SIZE and size != round(size):
            near = round(size)
            # sampling_probability * dataset_size may miss the whole number by rounding, by less than 1e-9
            if request.sampling_probability is None or abs(size - near) > 1e-9 * near:
                raise InputError(
                    f"{name} = {size!r} must be a whole number with sampling = {request.sampling!r}; use {max(near, 1)}"
                )
    if request.sampling == rules.ALLOCATION:
        return [Piece(until, n / slots_for(n, size)) for until, size in found]
    return (
        [Piece(until, float(round(size))) for until, size in found] if request.sampling in rules.OF_ONE_SIZE else found
    )


def _calibrated_noise(request: PlanRequest, segment: Segment) -> tuple[float, Bounds | None]:
    """Return the noise multiplier of a plain run, and epsilon of the whole tuning (None without repetitions)."""
    target = _target(request)
    rate, steps = segment.sampling_probability, segment.steps
    rtol = _tolerance(target)
    beside: Any = {"repetitions": request.repetitions, "candidates": request.candidates, "relation": request.relation}
    for aim in (target, target * (1.0 - 0.2 * rtol)):  # the lower aim is needed if rounding lifts epsilon too high
        c = calibrate_noise_multiplier(aim, request.target_delta, rate, steps, **beside, rtol=rtol)
        if not c.ok:
            raise _infeasible(target, str(c.status))
        sigma = float(c.value)
        if c.status == "not_binding":
            _warn_not_reached(target, "noise_multiplier", sigma, float(c.epsilon.upper))
        if request.repetitions is not None:
            return sigma, c.epsilon
        if _upper_epsilon(request, dp_sgd(sigma, sampling_probability=rate, steps=steps)) <= target:
            return sigma, None
    raise InputError(f"target_epsilon = {target!r} was met by no more than rounding; raise it a little")


def _most_steps(request: PlanRequest, rate: float, n: float) -> int:
    """Return the largest number of steps that meets the target."""
    target = _target(request)
    if request.sampling == rules.ORDER:
        raise InputError("steps is missing; give it or epochs, to which the noise of 'fixed_order' is relative")
    # the search counts whole rounds or passes: a part of one costs as much as the whole
    length = slots_for(n, rate * n) if request.sampling == rules.ALLOCATION else request.groups or 1
    if request.sampling in (rules.ALLOCATION, rules.CYCLIC):
        rate = 1.0 / length if request.sampling == rules.ALLOCATION else min(rate * length, 1.0)
    upper = lambda count: _upper_without_schedule(request, np.array(rate), length * count, n)
    # where a search starts, here at 1000 steps, changes only the time that it takes
    found = _searched(upper, target, np.ceil(1000.0 / length), (1.0, float(MAX_STEPS)), falls=False, whole=True)
    if math.isnan(found):
        raise _infeasible(target, "infeasible_steps")
    if found == MAX_STEPS:
        raise InputError(f"target_epsilon = {target!r} allows {found:g} steps and more; give steps or epochs")
    return length * int(found)


def _with_rate(request: PlanRequest, n: float) -> Solution:
    """Return the solution with the largest sampling probability that meets the target."""
    target = _target(request)
    if request.sampling in rules.WITH_NOISE:
        raise InputError(f"batch_size is missing; give it with {request.sampling!r}, and leave another setting open")

    def steps(rate: np.ndarray) -> np.ndarray:
        if request.steps is not None:
            return np.full(rate.shape, float(request.steps))
        return np.maximum(np.ceil(request.epochs / rate * (1.0 - ROUNDING)), 1.0)

    upper = lambda rate: _upper_without_schedule(request, rate, steps(rate), n)
    if request.sampling == rules.ALLOCATION:
        of_slots = lambda slots: upper(1.0 / slots)
        rate = 1.0 / _searched(of_slots, target, 100.0, (1.0, 1e9), falls=True, whole=True)
    elif request.sampling in rules.OF_ONE_SIZE:
        first = np.floor(0.01 * n + 1.0)
        rate = _searched(lambda size: upper(size / n), target, first, (1.0, n), falls=False, whole=True) / n
    else:
        limits = RATE_RANGE if request.steps is not None else (1.0 / n, 1.0)
        rate = _searched(upper, target, 0.01, limits, falls=False)
    if math.isnan(rate):
        raise _infeasible(target, "infeasible_rate")
    if rate == 1.0:
        spent = float(upper(np.array([rate]))[0])
        if spent < target * (1.0 - _tolerance(target)):
            _warn_not_reached(target, "sampling_probability", rate, spent)
    size = float(round(rate * n)) if request.sampling in rules.OF_ONE_SIZE else rate * n
    assert request.noise_multiplier is not None  # it is given, since the rate is left open
    sigma, count = request.noise_multiplier, int(steps(np.array(rate)))
    segments = with_rates((Segment(0, count, sigma, rate, size),), request.sampling, None, int(n))
    cap = _cap_of(request, rate, count) if request.sampling == rules.TRUNCATED else None
    return Solution(segments, sigma, cap=cap)


def _upper_without_schedule(request: PlanRequest, rate: np.ndarray, steps: np.ndarray, n: float) -> np.ndarray:
    """Return upper bounds of epsilon for a batch of runs without a schedule."""
    sampling = request.sampling
    sigma = np.full(np.broadcast_shapes(rate.shape, steps.shape), request.noise_multiplier)
    if sampling == rules.TRUNCATED:
        rates, counts = np.broadcast_arrays(rate, steps)
        cap = np.array([_cap_of(request, float(q), int(t)) for q, t in zip(rates, counts, strict=True)])
        return _upper_epsilon(request, repeat(single(rules.TRUNCATED, sigma, rates, cap, int(n)), steps))
    share, count = rate, steps
    if sampling == rules.FIXED:  # count passes, since each pass is one release
        share, count = np.array(1.0), np.ceil(steps / np.ceil(n / np.round(rate * n)))
    elif sampling == rules.ALLOCATION:  # count rounds, since each round is one release
        count = np.ceil(steps / nearest_slots(rate))
    elif sampling == rules.CYCLIC:  # count passes through the groups, since each pass is one release
        count = np.ceil(steps / request.groups)
    return _upper_epsilon(request, repeat(single(sampling, sigma, share), count))


def _cap_of(request: PlanRequest, rate: float, steps: int) -> int:
    """Return the cap of the request.

    A request without a cap gets the smallest cap whose cost in delta is negligible (`cap_for`).
    """
    if request.cap is not None:
        return request.cap
    if rate == 1.0:
        return request.dataset_size
    return cap_for(rate, request.dataset_size, steps, request.target_delta)


def _target(terms: PlanRequest) -> float:
    assert terms.target_epsilon is not None  # this is called only to solve for a target
    return terms.target_epsilon


def _tolerance(target: float) -> float:
    """Return the relative distance allowed between epsilon and the target: 1e-4/max(1, target), but at least 1e-6."""
    return max(1e-4 * min(1.0, 1.0 / target), 1e-6)


def _searched(
    upper: Callable[[np.ndarray], np.ndarray],
    target: float,
    start: float,
    limits: tuple[float, float],
    *,
    falls: bool,
    whole: bool = False,
) -> float:
    """Return the value at which the upper bound of epsilon is closest to the target, but does not exceed the target.

    Return NaN if the upper bound exceeds the target at every value.
    """
    rtol = _tolerance(target)
    # This share of the target stays unspent, since another evaluation may give a larger epsilon by rounding.
    margin = 1e-7 if whole else 0.05 * rtol
    return least_private(upper, target, start, limits, falls=falls, rtol=rtol, whole=whole, margin=margin)


def _infeasible(target: float, status: str) -> InputError:
    return InputError(f"target_epsilon = {target!r} cannot be met: {explain(status)}")


def _warn_not_reached(target: float, name: str, value: float, epsilon: float) -> None:
    """Warn that the search ended at a limit of its range, so that the plan spends less than the target."""
    warnings.warn(
        f"target_epsilon = {target!r} is not reached: {name} = {value!r} is the limit of the search, and gives "
        f"epsilon = {epsilon:.6g}; give another number yourself to spend more, or lower the target",
        stacklevel=2,
    )


# Changing a plan under way


def rest_of_run(
    terms: PlanRequest,
    segments: Sequence[Segment],
    step: int,
    steps: int | None,
    epochs: float | None,
    expected_batch_size: float | None,
) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    """Return the segments of the first `step` steps, and the segments of the later steps.

    Both are numbered from step 0.  The noise of the later segments is not yet scaled to meet the target.
    """
    n, sampling = terms.dataset_size, terms.sampling
    if steps is not None and epochs is not None:
        raise InputError("steps and epochs are both given; give one of them")
    spent = merged([s._replace(steps=max(min(s.end, step) - s.start, 0)) for s in segments])
    left = [(s.end - step, s) for s in segments if s.end > step] or [(1, segments[-1])]
    noise = [Piece(until, s.noise_multiplier) for until, s in left]
    batches = [Piece(until, s.expected_batch_size) for until, s in left]
    if expected_batch_size is not None:
        if terms.rates_digest is not None:
            raise InputError("expected_batch_size is the sum of sampling_rates in every step; leave it out")
        size = float(check("expected_batch_size", expected_batch_size, POSITIVE))
        if size > n or (sampling in rules.OF_ONE_SIZE and size != int(size)):
            what = "a whole number " if sampling in rules.OF_ONE_SIZE else ""
            raise InputError(f"expected_batch_size = {size!r} must be {what}<= dataset_size = {n}; use another size")
        batches = [Piece(None, n / slots_for(n, size) if sampling == rules.ALLOCATION else size)]
    # the last piece of each schedule lasts to the end of the new run
    noise, batches = ([*some[:-1], Piece(None, some[-1].value)] for some in (noise, batches))
    if epochs is not None:
        seen = math.fsum(s.steps * s.expected_batch_size for s in spent)
        examples = float(check("epochs", epochs, POSITIVE)) * n - seen
        count = steps_of(batches, examples) if examples > 0 else 0
    else:
        count = segments[-1].end - step if steps is None else int(check("steps", steps, COUNT)) - step
    if count < 1:
        raise InputError(f"step = {step} leaves no steps to recalibrate; give steps (or epochs) beyond it")
    rest = with_rates(joined(_cut(noise, count), _cut(batches, count), count, n), sampling, terms.groups, n)
    kept = sampling == rules.CYCLIC and rest[0].expected_batch_size == segments[0].expected_batch_size
    # Keep the old sampling probability.  A new one may differ from it by rounding.  If each record has a rate of its
    # own, a new one would be the average of these rates instead of the largest.
    if kept or terms.rates_digest is not None:
        rest = tuple(s._replace(sampling_probability=segments[0].sampling_probability) for s in rest)
    return spent, rest


def _cut(schedule: list[Piece], steps: int) -> list[Piece]:
    """Return the schedule of the first `steps` steps."""
    kept = [piece for piece in schedule if piece.until is not None and piece.until < steps]
    return [*kept, Piece(None, schedule[len(kept)].value)]
