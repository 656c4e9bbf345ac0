"""Checks the arguments of a `Plan`, and finds the one that is left open: noise, steps or sampling probability.

A search returns only a value whose epsilon a certified engine has computed (calibration/search.py).
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
from jaxacct.core.text import outward
from jaxacct.core.validation import COUNT, DELTA, POSITIVE, Constraint, InputError, check, check_one, choice
from jaxacct.mechanisms import RELATIONS, Mechanism, cap_for, dp_sgd
from jaxacct.mechanisms.dp_sgd_run import NOISE_RANGE, NUMBERS, SAME, usual_relation
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
from jaxacct.training.step.step_mechanisms import Release, composed, prefixes

DISPLACING = ("add_or_remove_one", "add_one", "remove_one")
"""Relations of adding or removing a record.  Rules in `UNSAMPLED` refuse them: other records would change batches."""
SIZE = Constraint("use a whole number of records or of slots", 1, 10**9, integral=True)
"""Range of `slots`, `cap` and `groups`. It is finite because the sampler counts in 32 bits."""
RULES = {"target_epsilon": POSITIVE, "target_delta": DELTA, "expected_batch_size": POSITIVE}
RULES |= NUMBERS | dict.fromkeys(("slots", "cap", "groups"), SIZE)
"""Names of the numbers that a caller may give, each with the values that it may have."""
_RATES = ("sampling_probability", "expected_batch_size", "sampling_rates", "batch_schedule", "slots")
Upper = Callable[[np.ndarray], np.ndarray]
"""Function from values of a setting to upper bounds of what the run then spends."""
_OPEN = {"noise_multiplier": ("noise_multiplier",), "steps": ("steps", "epochs"), "sampling_probability": _RATES}
"""For each setting that the solver can find, the arguments by which a caller can give it instead."""


@dataclass(frozen=True, eq=False, repr=False)
class PlanRequest:
    """Checked arguments of a `Plan`.  An argument that the caller left out, and that has no default, is None."""

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

    def __repr__(self) -> str:
        """Return the numbers and choices that differ from `DEFAULTS`."""
        known = ((each.name, getattr(self, each.name)) for each in fields(self) if each.repr)
        shown = (f"{name}={value!r}" for name, value in known if value is not None and value != DEFAULTS.get(name))
        return f"{type(self).__name__}({', '.join(shown)})"


_OWN = {"sampling": rules.POISSON, "data_dependent": False, "candidates": "iid", "unit": "record"}
DEFAULTS: dict[str, Any] = dict.fromkeys(each.name for each in fields(PlanRequest)) | _OWN
"""Default of each setting, as in the signature of `Plan`."""


def checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, with numbers as Python numbers.  Raise InputError for settings that no plan can have."""
    found = dict(settings)
    if SAME[rules.FIXED] == found["sampling"]:  # "shuffled" is the same rule; plans and ledgers store "fixed_batches"
        found["sampling"] = rules.FIXED
    choice("sampling", found["sampling"], rules.SAMPLING)
    for name in ("target_delta", "dataset_size"):
        if found[name] is None:
            raise InputError(f"{name} is missing; a plan needs the {name.replace('_', ' ')}")
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
    for name, rule in RULES.items():
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
    """Return the checked `sampling_rates` and their SHA-256 `rates_digest`; {} if only the digest is given."""
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
    """Return the largest rate and the sum of the rates: the plan's sampling probability and expected batch size."""
    return float(rates.max()), math.fsum(rates.tolist())


def _check_early_stop(found: Mapping[str, Any]) -> None:
    """Raise InputError for settings with which an early stop has no accounting."""
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
    """Return why plans with the batch rule `sampling` cannot have the relation `relation`, or "" if they can."""
    if sampling in (rules.POISSON, rules.CYCLIC) and relation == "replace_one":
        return (
            f"relation = 'replace_one' is not a relation of plans with sampling = {sampling!r}; plan by "
            "noise_multiplier, without relation; ja.epsilon(plan.mechanism, delta, relation='replace_one') is larger"
        )
    if sampling in rules.UNSAMPLED and relation in DISPLACING:
        return (
            f"relation = {relation!r} does not hold with sampling = {sampling!r}, where one record more moves another "
            f"to another batch; account for {rules.INSTEAD[sampling]}"
        )
    return ""


def unit_of_noise(strategy: Strategy, sampling: str, batches: int) -> float:
    """Return a strategy's sensitivity in clip norms, rounded up.  `batches` is the number of steps in a pass."""
    # in a fixed order, a record is used at most once in any `batches` steps
    apart = MinSeparation(batches) if sampling == rules.ORDER else SingleParticipation()
    return float(strategy.sensitivity(apart).upper)


def _correlated(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked "noise" and "groups".  Raise InputError where correlated noise has no accounting."""
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
    """Rényi filter [Feldman and Zrnic 2021]: a limit that holds even if steps are chosen during the run."""

    order: float  # fixed, like `budget`, before the first step (README.md, "Recalibration")
    budget: float  # the run never spends more Rényi divergence of order `order`

    def epsilon(self, delta: float) -> float:
        """Return the epsilon at delta of any run that stays within the filter."""
        return float(epsilon_from_renyi([self.order], [self.budget], delta).upper)


class Solution(NamedTuple):
    """Settings with which a plan meets its target, as the solver found them."""

    segments: tuple[Segment, ...]
    noise_multiplier: float  # the overall scale of the noise, by which a noise schedule is multiplied
    filter: Filter | None = None  # the Renyi filter of a plan with data_dependent = True, else None
    epsilon: Bounds | None = None  # epsilon of all repetitions together, if the search has computed it
    cap: int | None = None  # the largest batch of truncated Poisson sampling; None for other batch rules


def epsilon_of_run(terms: PlanRequest, mechanism: Mechanism) -> Bounds:
    """Return epsilon at the target delta, by exact composition.  For a batch of mechanisms return one epsilon each."""
    # Most bounds are narrower than `rtol` anyway.  For the other runs an `rtol` below 2e-4 would take seconds.
    rtol = max(0.2 * _tolerance(terms.target_epsilon or 1.0), 2e-4)
    return account.epsilon(mechanism, terms.target_delta, relation=terms.relation, rtol=rtol)


def epsilon_of_several(terms: PlanRequest, counts: Sequence[Mapping[Release, int]], rtol: float) -> Bounds:
    """Return epsilon at the target delta for each of several collections of releases."""
    places: dict[frozenset[Release], list[int]] = {}
    for place, each in enumerate(counts):
        kinds = frozenset(each) if terms.sampling in rules.BY_PASS else frozenset()
        places.setdefault(kinds, []).append(place)
    runs = lambda group: with_early_stop(prefixes([counts[i] for i in group]), terms.early_stop)
    epsilon = lambda group: account.epsilon(runs(group), terms.target_delta, relation=terms.relation, rtol=rtol)
    return in_order([(group, epsilon(group)) for group in places.values()])


def spent_renyi(mechanism: Mechanism, chosen: Filter, relation: str) -> np.ndarray:
    """Return the Rényi divergence of a mechanism at the filter's order: what the mechanism takes from the budget."""
    return np.asarray(renyi_curve(mechanism, [chosen.order], relation).values[0])


def _filters(mechanism: Mechanism, terms: PlanRequest) -> tuple[np.ndarray, np.ndarray]:
    """Return Rényi divergences at `ORDERS`, and the epsilons that they imply: two arrays of shape (orders, runs)."""
    # If the same steps are added up in another order, rounding may give a larger sum.  The factor makes room for that.
    used = np.asarray(renyi_curve(mechanism, ORDERS, terms.relation).values) * (1.0 + 1e-10)
    pairs = zip(ORDERS, used, strict=True)
    promised = [epsilon_from_renyi([order], np.asarray(one)[None], terms.target_delta).upper for order, one in pairs]
    return used, np.stack(promised)


def _upper_epsilon(terms: PlanRequest, mechanism: Mechanism) -> np.ndarray:
    """Return the upper bound of epsilon of each run; for a data-dependent plan, the least that a filter promises."""
    if terms.data_dependent:
        return np.min(_filters(mechanism, terms)[1], axis=0)
    return np.asarray(epsilon_of_run(terms, with_early_stop(mechanism, terms.early_stop)).upper)


def solve(request: PlanRequest) -> Solution:
    """Return the settings that solve a request, with a Rényi filter if `data_dependent` is True."""
    solution = _solved(request)
    if not request.data_dependent:
        return solution
    used, promised = _filters(composed(_releases(request, solution.segments)), request)
    best = int(np.argmin(promised))
    if not np.isfinite(used[best]):
        raise InputError("data_dependent = True: no Renyi divergence of the plan is finite; use more noise")
    return solution._replace(filter=Filter(float(ORDERS[best]), float(used[best])))


def _releases(terms: PlanRequest, segments: Sequence[Segment]) -> Counter[Release]:
    """Return how often each release occurs in the steps of some segments."""
    end = segments[-1].end if segments else 0
    return releases(segments, end, terms.sampling, terms.dataset_size, cap=terms.cap or 0)


def noise_for(
    terms: PlanRequest, spent: tuple[Segment, ...], rest: tuple[Segment, ...], start: float | None = None
) -> float:
    """Return the smallest scale of the noise of `rest` with which the steps of `spent` and `rest` meet the target."""
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
    """Return the smallest scale of the noise of `rest` with which the steps of `spent` and `rest` fit a filter."""
    step = spent[-1].end if spent else 0
    left = chosen.budget * (1.0 - 1e-9)
    if spent and not spent_renyi(composed(_releases(terms, spent)), chosen, terms.relation) < left:
        raise InputError(f"step = {step}: nothing is left of the Renyi filter, which holds the plan's use; stop")
    used = lambda scales: spent_renyi(_together(terms, spent, rest, scales), chosen, terms.relation)
    found = _searched(used, chosen.budget, start, NOISE_RANGE, falls=True)
    if math.isnan(found):
        raise InputError(f"step = {step}: {explain('infeasible_noise')}")
    return found


def _together(terms: PlanRequest, spent: Sequence[Segment], rest: Sequence[Segment], scales: np.ndarray) -> Mechanism:
    """Return one mechanism for each scale: the steps of `spent`, and those of `rest` with their noise scaled."""
    # a pass may begin in `spent` and end in `rest`, so count the releases of the whole run
    return prefixes([_releases(terms, merged([*spent, *scaled(rest, float(scale))])) for scale in scales])


def _solved(request: PlanRequest) -> Solution:
    """Return the solution of a request, without its filter."""
    # a plain run has Poisson sampling with one rate and one noise multiplier; `_calibrated_noise` finds its noise
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
    if request.sampling_rates is not None:  # solve at the largest rate, whose epsilon covers all records
        rate = rate_and_batch(request.sampling_rates)[0]
        request = replace(request, sampling_probability=rate)
    if opened == "steps":
        if request.sampling == rules.TRUNCATED:
            # `_cap_of` needs the number of steps, which is not known yet.  A million is more than most runs have.
            request = replace(request, cap=_cap_of(request, rate, 10**6))
        steps = _most_steps(request, rate, n)
    elif request.steps:
        steps = request.steps
    else:
        assert request.epochs is not None
        steps = steps_of(batches, request.epochs * n)
    segments = with_rates(joined(noise, batches, steps, int(n)), request.sampling, request.groups, int(n))
    if request.sampling not in (rules.ALLOCATION, *rules.OF_ONE_SIZE) and request.sampling_probability is not None:
        # use the given rate: the rate of the segments was computed from their batch size and may differ by rounding
        rate = request.sampling_probability
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
    """Return the setting to solve for; None without a target.  Refuse a request if `solve` cannot find what is open."""
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
    """Return the expected batch sizes as pieces.  Raise InputError for sizes that do not fit the `n` records."""
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
            # allow a size computed as sampling_probability * dataset_size a relative rounding error of 1e-9
            if request.sampling_probability is None or abs(size - near) > 1e-9 * near:
                raise InputError(
                    f"{name} = {size!r} must be a whole number with sampling = {request.sampling!r}; use {max(near, 1)}"
                )
    if request.sampling == rules.ALLOCATION:
        return [Piece(until, n / slots_for(n, size)) for until, size in found]
    if request.sampling in rules.OF_ONE_SIZE:
        return [Piece(until, float(round(size))) for until, size in found]
    return found


def _calibrated_noise(request: PlanRequest, segment: Segment) -> tuple[float, Bounds | None]:
    """Return a plain run's noise multiplier, and epsilon of all K repetitions together (None for a single run)."""
    target = _target(request)
    rate, steps = segment.sampling_probability, segment.steps
    rtol = _tolerance(target)
    beside: Any = {"repetitions": request.repetitions, "candidates": request.candidates, "relation": request.relation}
    aim = target
    for _ in range(3):
        c = calibrate_noise_multiplier(aim, request.target_delta, rate, steps, **beside, rtol=rtol)
        if not c.ok:
            raise _infeasible(target, str(c.status))
        sigma = float(c.value)
        if c.status == "not_binding":
            _warn_not_reached(target, "noise_multiplier", sigma, float(c.epsilon.upper))
        if request.repetitions is not None:
            return sigma, c.epsilon
        spent = float(_upper_epsilon(request, dp_sgd(sigma, sampling_probability=rate, steps=steps)))
        if spent <= target:
            return sigma, None
        # The plan will report the epsilon `spent`, which exceeds the target.  Aim lower in proportion and a bit more.
        aim *= target / spent * (1.0 - 0.2 * rtol)
    raise InputError(f"target_epsilon = {target!r} cannot be met, since rounding alone exceeds it; raise it a little")


def _most_steps(request: PlanRequest, rate: float, n: float) -> int:
    """Return the largest number of steps with which a run without a schedule meets the target."""
    target = _target(request)
    if request.sampling == rules.ORDER:
        raise InputError("steps is missing; give it or epochs, to which the noise of 'fixed_order' is relative")
    # part of a round or pass costs as much as all of it: search for a number of rounds or passes of `length` steps
    length = slots_for(n, rate * n) if request.sampling == rules.ALLOCATION else request.groups or 1
    upper = lambda counts: _upper_of(request, [_without_schedule(request, rate, length * int(c), n) for c in counts])
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

    def steps(rate: float) -> int:
        if request.steps is not None:
            return request.steps
        assert request.epochs is not None
        return max(math.ceil(request.epochs / rate * (1.0 - ROUNDING)), 1)

    upper = lambda rates: _upper_of(request, [_without_schedule(request, float(q), steps(float(q)), n) for q in rates])
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
    return _without_schedule(request, rate, steps(rate), n)


def _without_schedule(request: PlanRequest, rate: float, steps: int, n: float) -> Solution:
    """Return a run on `n` records, with one rate and the noise of the request."""
    assert request.noise_multiplier is not None
    size = float(round(rate * n)) if request.sampling in rules.OF_ONE_SIZE else rate * n
    whole = (Segment(0, steps, request.noise_multiplier, rate, size),)
    cap = _cap_of(request, rate, steps) if request.sampling == rules.TRUNCATED else None
    segments = with_rates(whole, request.sampling, request.groups, int(n))
    return Solution(segments, request.noise_multiplier, cap=cap)


def _upper_of(request: PlanRequest, runs: Sequence[Solution]) -> np.ndarray:
    """Return an upper bound of epsilon for each run."""
    return _upper_epsilon(request, prefixes([_releases(replace(request, cap=run.cap), run.segments) for run in runs]))


def _cap_of(request: PlanRequest, rate: float, steps: int) -> int:
    """Return the request's cap on the batch size; by default the smallest cap of negligible cost in delta."""
    if request.cap is not None:
        return request.cap
    if rate == 1.0:
        return request.dataset_size
    return cap_for(rate, request.dataset_size, steps, request.target_delta)


def _target(terms: PlanRequest) -> float:
    assert terms.target_epsilon is not None  # callers solve for a target, so the request has one
    return terms.target_epsilon


def _tolerance(target: float) -> float:
    """Return the relative distance allowed between epsilon and the target: 1e-4/max(1, target), but at least 1e-6."""
    return max(1e-4 * min(1.0, 1.0 / target), 1e-6)


def _searched(
    upper: Upper, target: float, start: float, limits: tuple[float, float], *, falls: bool, whole: bool = False
) -> float:
    """Return the argument at which the bound `upper` is closest to the target but not above it; NaN if none is."""
    rtol = _tolerance(target)
    # This share of the target stays unspent, since another evaluation may give a larger epsilon by rounding.
    margin = 1e-7 if whole else 0.05 * rtol
    return least_private(upper, target, start, limits, falls=falls, rtol=rtol, whole=whole, margin=margin)


def _infeasible(target: float, status: str) -> InputError:
    return InputError(f"target_epsilon = {target!r} cannot be met: {explain(status)}")


def _warn_not_reached(target: float, name: str, value: float, epsilon: float) -> None:
    """Warn that the search ended at a limit of its range, so that the plan spends less than the target."""
    warnings.warn(
        f"target_epsilon = {target!r} is not reached: {name} = {value!r} is the limit of the search, and gives epsilon "
        f"<= {outward(epsilon, '.6g', up=True)}; give another number yourself to spend more, or lower the target",
        stacklevel=2,
    )


def rest_of_run(
    terms: PlanRequest,
    segments: Sequence[Segment],
    step: int,
    steps: int | None,
    epochs: float | None,
    expected_batch_size: float | None,
) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    """Return the segments before `step`, and those after it, counted from 0 again and with noise still unscaled."""
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
    # the last piece of each schedule lasts to the end of the new run, so its `until` is None
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
    # keep the old rate: a new one may differ by rounding, and would be the average of `sampling_rates`, not the largest
    if kept or terms.rates_digest is not None:
        rest = tuple(s._replace(sampling_probability=segments[0].sampling_probability) for s in rest)
    return spent, rest


def _cut(schedule: list[Piece], steps: int) -> list[Piece]:
    """Return the schedule of the first `steps` steps."""
    kept = [piece for piece in schedule if piece.until is not None and piece.until < steps]
    return [*kept, Piece(None, schedule[len(kept)].value)]
