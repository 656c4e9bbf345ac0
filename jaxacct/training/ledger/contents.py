"""Adds up a ledger's entries, bounds the epsilon of the total, and decides whether another step fits the target."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path

from jaxacct.accounting import account
from jaxacct.core.bounds import Bounds
from jaxacct.core.validation import InputError, covers
from jaxacct.mechanisms import Mechanism, compose, repeat
from jaxacct.mechanisms.base import weakest
from jaxacct.mechanisms.dp_sgd_run import nearest_slots
from jaxacct.representations.renyi_divergences import epsilon_from_renyi, renyi_curve
from jaxacct.training.ledger.format import Line, Run, Seen, Spend, Step, Torn, runs_of
from jaxacct.training.plan import Plan
from jaxacct.training.plan.segments import Segment, gathered, stand_ins
from jaxacct.training.plan.solver import DISPLACING
from jaxacct.training.step import step_mechanisms as rules
from jaxacct.training.step.step_mechanisms import Release, Turn, composed, release_of_pass

MANY_RELEASES = 300
"""Largest number of different releases that are composed as they are.  More are replaced by stand-ins, to save time."""
EARLY_STOP = "early stop of the plan"
"""Note of the ledger entry by which all answers of the plan's early stop count as spent."""
STOPPED_EARLY = "stopped early by the plan, after step "
"""First words of a note that gives the step after which the early stop ended the run.  Its entry releases nothing."""


@dataclass
class _Partition:
    """Step entries of one pass or round, or of one run in a fixed order.  Together they cost what `dearest` costs."""

    first: Step
    steps: dict[int, list[float]] = field(default_factory=dict)  # {step number: the noise multipliers of its entries}
    dearest: list[float] = field(default_factory=list)  # the noise multipliers that set the cost

    def has_room_for(self, entry: Step) -> bool:
        """Return whether a step can join: its batch rule, rate and groups are the same, and a round has a free slot."""
        first, share, groups = self.first, self.first.sampling_probability, self.first.groups
        if first.sampling != entry.sampling or first.sampling == rules.FIXED:
            return first.sampling == entry.sampling
        if first.sampling == rules.ORDER:
            return entry.step not in self.steps
        if share != entry.sampling_probability:
            return False
        if first.sampling == rules.CYCLIC:
            return entry.groups == groups and entry.step // groups == first.step // groups
        free = entry.step in self.steps or bool(len(self.steps) < nearest_slots(share))
        return first.sampling == rules.ALLOCATION and free  # steps of any other rule are releases of their own

    def goes_on(self, plan: Plan, step: int) -> bool:
        """Return whether a plan's step can join.  If passes draw new batches, all entries must be of the same pass."""
        if plan.sampling == rules.ORDER and step in self.steps:
            return self.first.sampling == rules.ORDER
        _, first, last = plan.pass_of(step)
        anew = plan.sampling in rules.WITH_PASS_KEYS
        return self.has_room_for(_entry(plan, step)) and not (anew and any(not first <= n < last for n in self.steps))

    def dearest_with(self, entries: Iterable[tuple[int, float]]) -> list[float]:
        """Return what `dearest` is after more entries (step number, noise multiplier), at most one for each step."""
        dearest = self.dearest
        for step, noise in entries:
            mine = sorted([*self.steps.get(step, []), noise])
            # under CYCLIC `cost` cannot find the dearest step: entry i of `dearest` is the least entry i of all steps
            if self.first.sampling == rules.CYCLIC:
                dearest = [min(pair) for pair in zip_longest(dearest, mine, fillvalue=math.inf)]
            elif cost(mine) > cost(dearest):
                dearest = mine
        return dearest

    def change(self, dearest: list[float]) -> Counter[Release]:
        """Return how a new `dearest` changes the counts of releases.  Releases that it removes have negative counts."""
        change = Counter(self._releases(dearest))
        change.subtract(self._releases(self.dearest))
        return change

    def _releases(self, noise: list[float]) -> list[Release]:
        """Return the partition's releases if `dearest` is `noise`: one for a round, else one per noise multiplier."""
        if self.first.sampling == rules.ALLOCATION and len(noise) > 1:
            # with at most 1000 terms, `cost` has a relative error below 2^-40: the factor lowers the noise by more
            noise = [(1.0 - 2.0**-40) / cost(noise)]
        return [release_of_pass(self.first.sampling, sigma, self.first.sampling_probability) for sigma in noise]


def _entry(plan: Plan, step: int) -> Step:
    return Step("", step, "", "", *plan.at(step)[2:4], plan.sampling, None, groups=plan.groups or 0)


@dataclass
class Spent:
    """Releases of one run, derived from its entries alone."""

    releases: Counter[Release] = field(default_factory=Counter)  # how often each release of a training step counts
    others: Counter[Mechanism] = field(default_factory=Counter)  # how often each other mechanism was released
    noted: list[Spend] = field(default_factory=list)
    steps: int = 0  # the number of step entries, without exact replays of an entry
    again: int = 0  # how many step entries repeat the step number of an earlier step entry
    same: int = 0  # the number of exact replays, which cost nothing
    torn: int = 0  # the number of lines that were cut off; each counts as one more release, but not in `steps`
    seen: set[Step] = field(default_factory=set)
    numbers: set[int] = field(default_factory=set)  # the step numbers of `seen`
    partitions: dict[str, _Partition] = field(default_factory=dict)  # {fingerprint: the pass or round}
    last: Step | None = None
    next: int = 0  # the number of the step that follows the last entry
    looks: Seen | None = None  # the `Seen` entry of the current plan, or None
    owed: Counter[Release] = field(default_factory=Counter)  # untaken steps of replaced plans, if outputs were seen
    shared: int | None = 0  # the first step under a plan with correlated noise (`Plan.shared`), or None

    @property
    def of_tunings(self) -> bool:
        """Whether the run has entries, and each of them is the cost of a hyperparameter tuning."""
        tuned = [entry.note.startswith("tuning") for entry in self.noted]
        return all(tuned) and bool(tuned) and not (self.numbers or self.torn)

    @property
    def ended(self) -> int | None:
        steps = (entry.note.removeprefix(STOPPED_EARLY) for entry in self.noted if entry.note.startswith(STOPPED_EARLY))
        return next((int(step) for step in steps if step.isdecimal()), None)

    def has_early_stop(self, plan: Plan) -> bool:
        noted = (entry.mechanism for entry in self.noted if entry.note == EARLY_STOP)
        return plan.early_stop is not None and plan.early_stop.mechanism in noted

    def add(self, entry: Step | Spend | Torn | Seen) -> None:
        """Count one more entry; a step and its exact replays count once."""
        if isinstance(entry, Spend):
            self.others[entry.mechanism] += 1
            self.noted.append(entry)
            return
        if isinstance(entry, Seen):
            self.looks, self.next = entry, entry.step
            return
        if isinstance(entry, Torn):
            self.torn += 1
            self.next += 1  # a torn line costs at least as much as the next step, so it stands for that step
            self._release(entry)
            return
        if entry in self.seen:
            self.same += 1
            return
        self.seen.add(entry)
        again = entry.step in self.numbers
        shares = entry.sampling == rules.CYCLIC and self.shared is not None
        if shares and not self.leads_to(entry.turn):
            self._release(entry)
        self.last, self.next = entry, entry.step + 1
        self.again += again
        self.steps += 1
        self.numbers.add(entry.step)
        if entry.sampling in rules.BY_PASS and entry.partition is not None and not (again and shares):
            partition = self.partitions.setdefault(entry.partition, _Partition(entry))
            if partition.has_room_for(entry):
                self._within(partition, entry)
                return
        self._release(entry)

    def leads_to(self, now: Turn) -> bool:
        """Return whether `now` is step `shared`, a repeat, or `follows` the last.  Others cost one more release."""
        return now.step == self.shared or now.step in self.numbers or now.follows(self.last and self.last.turn)

    def _release(self, entry: Step | Torn) -> None:
        """Count an entry outside of partitions as one release.  Its rate is 1 if the batch rule has passes."""
        share = 1.0 if entry.sampling in rules.BY_PASS else entry.sampling_probability
        self.releases[Release(entry.sampling, entry.noise_multiplier, share, entry.cap, entry.dataset_size)] += 1

    def _within(self, partition: _Partition, entry: Step) -> None:
        dearest = partition.dearest_with([(entry.step, entry.noise_multiplier)])
        partition.steps.setdefault(entry.step, []).append(entry.noise_multiplier)
        if dearest != partition.dearest:
            self.releases.update(partition.change(dearest))
            self.releases += Counter()  # removes the releases whose count is now 0
            partition.dearest = dearest

    def of_pass(self, plan: Plan, step: int) -> _Partition | None:
        """Return the partition of a step's pass under cyclic Poisson sampling; None if the pass has no entries."""
        if not _inside(self.numbers, *plan.pass_of(step)[1:]):
            return None
        turns = (each for each in self.partitions.values() if each.first.sampling == rules.CYCLIC)
        return next((each for each in turns if each.goes_on(plan, step)), None)


def cost(noise: list[float]) -> float:
    """Return the root of the sum of 1/sigma^2 of several Gaussians: a larger root means a larger leak."""
    return math.hypot(*(1.0 / sigma for sigma in noise))


def fewer(counts: Mapping[Release, int], dearer: bool = True) -> Counter[Release]:
    """Replace similar releases by stand-ins, `dearer` or cheaper ones (README.md, "Many releases that differ")."""
    return gathered(counts, stand_ins(counts, MANY_RELEASES, dearer))


def added(several: Iterable[Spent]) -> tuple[Counter[Release], Counter[Mechanism]]:
    releases: Counter[Release] = Counter()
    others: Counter[Mechanism] = Counter()
    for spent in several:
        releases.update(spent.releases)
        others.update(spent.others)
    return releases, others


def total(several: list[Spent], dearer: bool | None = None) -> Mechanism:
    """Return all releases of some runs as one mechanism; unless `dearer` is None, training releases become `fewer`."""
    releases, others = added(several)
    known = releases if dearer is None else fewer(releases, dearer)
    parts = [composed(known)] if releases or not others else []
    parts += [mechanism if count == 1 else repeat(mechanism, count) for mechanism, count in others.items()]
    return parts[0] if len(parts) == 1 else compose(*parts)


def claim(runs: Sequence[tuple[Spent, list[Run]]], delta: float, relation: str | None) -> Bounds:
    """Return bounds of epsilon of runs (spending, `Run` entries) by the rules of README.md, "What may be claimed"."""
    relations = {line.plan.relation for _, headers in runs for line in headers}
    if relation is None:
        if len(relations) > 1:
            raise InputError(f"relation is missing; the plans have {' and '.join(sorted(relations))}, choose one")
        relation = next(iter(relations))
    for spent, headers in runs:
        noted = {line.plan.relation for line in headers}
        covered = all(covers(one, relation) for one in noted)
        if not covered and (stated := [one for one in spent.others if not one.of_every_relation()]):
            raise InputError(
                f"relation = {relation!r}, but {type(stated[0]).__name__} was noted as a guarantee for "
                f"{' and '.join(sorted(noted))}, and says nothing of other neighbours; ask for that relation"
            )
    if len({line.plan.unit for _, headers in runs for line in headers}) > 1:
        raise InputError("runs of records and of users are in it, whose guarantees do not add up; ask for one run")
    drawn = {line.plan.sampling for _, headers in runs for line in headers}
    drawn |= {release.sampling for spent, _ in runs for release in spent.releases}
    if relation in DISPLACING and (fixed := [rule for rule in rules.UNSAMPLED if rule in drawn]):
        raise InputError(
            f"relation = {relation!r} does not hold for fixed batches, where one record more moves another to another "
            f"batch; account for {' and '.join(rules.INSTEAD[rule] for rule in fixed)}"
        )
    every = [[line.plan.filter for line in headers if line.plan.filter] for _, headers in runs]
    orders = {one.order for several in every for one in several}
    if not orders:
        return _composed([spent for spent, _ in runs], delta, relation)
    if len(orders) > 1 or relations != {relation}:
        raise InputError("the runs have Renyi filters of different orders or relations; ask for one run at a time")
    used = 0.0
    for (spent, _), several in zip(runs, every, strict=True):
        renyi = float(renyi_curve(total([spent]), [*orders], relation).values[0])
        budget = max((one.budget for one in several), default=renyi)
        used += budget if renyi <= budget else math.inf
    upper = float(epsilon_from_renyi([*orders], [used], delta).upper)
    return Bounds(0.0, upper, upper, "bound", "width" if math.isinf(upper) else "ok", "rdp_filter")


def _composed(several: list[Spent], delta: float, relation: str) -> Bounds:
    """Return bounds of the runs' joint epsilon, wider ones if there are more than MANY_RELEASES different releases."""
    if len(set().union(*(spent.releases for spent in several))) <= MANY_RELEASES:
        return account.epsilon(total(several), delta, relation=relation)
    most = account.epsilon(total(several, dearer=True), delta, relation=relation)
    least = account.epsilon(total(several, dearer=False), delta, relation=relation)
    lower, upper = float(least.lower), float(most.upper)
    narrow = upper - lower <= 1e-4 * upper  # `jaxacct.epsilon`, too, returns the status "ok" up to this width
    status = most.status if not most.ok else least.status if not least.ok else "ok" if narrow else "width"
    kind = weakest([str(most.kind), str(least.kind)])
    return Bounds(lower if kind == "certified" else 0.0, float(most.estimate), upper, kind, status, most.engine)


class Contents:
    """Contents of a ledger.  `runs` maps a run's name to its spending; `headers` maps the name to its `Run` entries."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: dict[str, Spent] = {}
        self.headers: dict[str, list[Run]] = {}
        self.run = ""
        # the last spending that `leaves_room` found within the target: (plan as JSON, releases, other mechanisms)
        self._certified: tuple[str, Counter[Release], Counter[Mechanism]] | None = None

    @property
    def plan(self) -> Plan:
        return self.headers[self.run][-1].plan

    def releases(self, run: str | None = None) -> Counter[Release]:
        """Return the counts of the releases of all training steps in the ledger, of one run or of all runs."""
        return added(self._known(name) for name in self._names(run))[0]

    def spent(self, run: str | None = None) -> Mechanism:
        """Return all releases of one run or of all runs as one mechanism.  The releases of `promised` count, too."""
        return total([self.counting(name) for name in self._names(run)])

    def epsilon(
        self, delta: float, relation: str | None = None, run: str | None = None, *, whole: bool = False
    ) -> Bounds:
        """Return bounds of epsilon of one run, or of all runs together.  The releases of `promised` count, too.

        Set `whole` if somebody ended a run because of outputs, such as checkpoints, that no callback asked for:
        every run then counts to the end of its plan.  A run with a filter costs the filter's whole budget (kind
        "bound"); epsilon is inf if the run has spent more.  If `relation` is None, the plans' relation is used.
        """
        names = self._names(run)
        return claim([(self.counting(name, whole), self.headers[name]) for name in names], delta, relation)

    def epsilon_of_entries(self, delta: float, relation: str | None = None, run: str | None = None) -> Bounds:
        """Return epsilon of the entries alone.  It is no valid claim if outputs may have decided where a run ended."""
        return claim([(self._known(name), self.headers[name]) for name in self._names(run)], delta, relation)

    def counting(self, run: str, whole: bool = False) -> Spent:
        """Return everything that counts for a run: its entries, and the rest of its plan if its outputs were seen."""
        spent, more = self._known(run), self.promised(run, whole)
        return replace(spent, releases=spent.releases + more) if more else spent

    def promised(self, run: str, whole: bool = False) -> Counter[Release]:
        """Return `owed` and the releases `ahead` up to the promised end; if `whole`, up to the plan's end (README.md).

        With a filter return only `owed`, since a filter holds wherever the run ends.
        """
        spent, plan = self._known(run), self.headers[run][-1].plan
        promised = Counter(spent.owed)
        if not plan.filter:
            until = plan.steps if whole else spent.next if spent.looks is None else spent.looks.until
            promised.update(ahead(plan, spent, spent.next, until - spent.next, None))
        return promised

    def taken_and_ahead(self, run: str) -> tuple[Counter[Release], Counter[Release]]:
        """Return (releases of a run so far, without those that `promised` removes; releases that `promised` adds)."""
        change = self.promised(run)
        return self.runs[run].releases - -change, +change

    def unfinished(self, run: str | None = None) -> list[str]:
        """Return the runs (`run`, or all; no tunings) that stopped before their plan's end without a `Seen` entry."""
        ended = [name for name in self._names(run) if self.runs[name].looks is None and not self.runs[name].of_tunings]
        return [name for name in ended if self.promised(name, whole=True)]

    def choice(self, run: str) -> Plan | None:
        """If a run has steps, return its last plan with repetitions.  Step costs omit the choice among the K runs."""
        spent, plans = self._known(run), [line.plan for line in self.headers[run] if line.plan.repetitions is not None]
        return plans[-1] if plans and (spent.numbers or spent.torn) else None

    def count(self, entry: Line) -> None:
        """Count one more entry.  A `Run` entry makes its run the current one."""
        if isinstance(entry, Run):
            self._begin(entry)
            return
        spent = self._known(entry.run)
        if isinstance(entry, Seen):
            header = self.headers[entry.run][-1]
            if entry.until > header.plan.steps:
                raise InputError(f"{self.path}: until = {entry.until} is beyond the plan of run {entry.run!r:.60}")
            if header.version == 2:  # version 2 could write too small an `until`: count the whole plan
                entry = entry._replace(until=header.plan.steps)
        spent.add(entry)

    def _begin(self, entry: Run) -> None:
        """Begin a run, or continue it with another plan (README.md, "Outputs that were seen")."""
        headers, spent = self.headers.setdefault(entry.run, []), self.runs.setdefault(entry.run, Spent())
        self.run = entry.run
        if not headers or headers[-1].plan != entry.plan:
            if spent.looks is not None and spent.looks.looked:
                spent.owed = +self.promised(entry.run)  # `+` drops negative counts
            spent.looks = None if entry.told else Seen(entry.run, spent.next, entry.plan.steps, False)
        if spent.shared is None or not (spent.numbers or spent.torn):  # no step so far has correlated noise
            spent.shared = spent.next if entry.plan.shared else None
        headers.append(entry)

    def torn(self, fragment: bytes) -> list[Torn]:
        """Return one step for each run that a cut-off line may belong to, since each run may be claimed by itself."""
        return [self._costliest(name) for name in runs_of(fragment, self.runs)]

    def _costliest(self, name: str) -> Torn:
        """Return the costliest step that a cut-off line of a run can have held: its least noise and highest rate."""
        known = [*self.runs[name].releases]
        for line in self.headers[name]:
            known += [Release(line.plan.sampling, *s[2:4], *line.plan.truncation) for s in line.plan.segments]
        noise = min(release.noise_multiplier for release in known)
        rate = max(release.sampling_probability for release in known)
        sampling = self.headers[name][-1].plan.sampling
        if sampling == rules.TRUNCATED:
            # With a cap, a higher rate may leak less.  A Gaussian of half the noise leaks at least as much as a
            # step with any rate and cap: one record that displaces another changes the sum by at most 2 clip norms.
            if len({(release.sampling, *release[2:]) for release in known}) > 1:
                return Torn(name, noise / 2.0, 1.0, rules.POISSON)
            return Torn(name, noise, rate, rules.TRUNCATED, known[0].cap, known[0].dataset_size)
        return Torn(name, noise, 1.0 if sampling == rules.ALLOCATION else rate, sampling)

    def leaves_room(self, plan: Plan, next_step: int, partition: str | None = None, steps: int = 1) -> bool:
        """Return whether a plan's target and filter allow its next `steps` steps on top of all that counts so far."""
        held, others = _held(plan, self, self.run)
        if not _filter_leaves_room(plan, self, self.run):
            return False
        more = lambda steps: ahead(plan, self.runs[self.run], next_step, steps, partition, begins=True)
        wanted = held + more(steps)
        if not others and plan.within and wanted <= plan.whole:
            return True
        document = plan.to_json()
        if self._certified is not None:
            of_plan, releases, beside = self._certified
            if (of_plan, beside) == (document, others) and wanted <= releases:
                return True
        least = room(plan, self, next_step, partition, begins=True)
        if least:
            self._certified = document, held + more(least), others
        return least >= steps

    def _names(self, run: str | None) -> list[str]:
        return list(self.runs) if run is None else [run]

    def _known(self, run: str) -> Spent:
        if run not in self.runs:
            raise InputError(f"run = {run!r:.60} is not in {self.path}; it has {', '.join(map(repr, self.runs))}")
        return self.runs[run]


def ahead(plan: Plan, spent: Spent, step: int, steps: int, label: str | None, begins: bool = False) -> Counter[Release]:
    """Count exactly the releases that steps `step` to `step + steps - 1` add to a run (README.md, "The stop rule").

    A cheaper release that a step replaces counts negatively.  `label` is the fingerprint of the first step's pass or
    round; None means the fingerprint in the last step entry.  With None, each step counts alone in two cases: the last
    step entry has the plan's batch rule and no fingerprint, or there is no step entry and `begins` is True.
    """
    if steps < 1:
        return Counter()
    end, last = step + steps, spent.last
    if plan.sampling not in rules.BY_PASS:
        return plan.releases_between(step, end)
    stop = min(plan.pass_of(step)[2], end)
    partition = spent.partitions.get((last and last.partition) or "" if label is None else label)
    fits = partition is not None and partition.goes_on(plan, step)
    first = step  # steps before `first` count alone, each as a Gaussian; `first` and later steps join passes
    if label is None and (begins if last is None else last.partition is None and last.sampling == plan.sampling):
        first = end
    elif partition is not None and label is not None and not fits:
        first = stop
    shares = plan.sampling == rules.CYCLIC and (plan.shared or spent.shared is not None)
    alone = lambda noise: Release(plan.sampling, noise, 1.0)
    found: Counter[Release] = Counter()
    if shares and not spent.leads_to(plan.turn(step)):
        found[alone(plan.at(step).noise_multiplier)] += 1
    for segment, low, high in _pieces(plan, step, first):
        found[alone(segment.noise_multiplier)] += high - low
    # cyclic Poisson sampling keeps its groups, so without a label a step joins the earlier entries of its pass
    anew = label is not None or plan.sampling != rules.CYCLIC
    passes = [(step, stop, partition if fits else None if anew else spent.of_pass(plan, step))] if first == step else []
    if plan.sampling == rules.CYCLIC and first < end and _inside(spent.numbers, stop, plan.pass_of(end - 1)[2]):
        starts = range(stop, end, plan.pass_of(step)[2] - plan.pass_of(step)[1])
        passes += [(each, min(plan.pass_of(each)[2], end), spent.of_pass(plan, each)) for each in starts]
    else:
        found.update(plan.releases_between(max(first, stop), end))
    for begin, until, known in passes:
        own = _Partition(_entry(plan, begin)) if known is None else known
        apart = spent.numbers if shares else own.steps if plan.sampling == rules.ORDER else ()
        joining = []
        for segment, low, high in _pieces(plan, begin, until):
            again = _inside(apart, low, high)  # steps that have an entry; another entry counts outside of the pass
            inside = [number for number in _inside(own.steps, low, high) if number not in apart]
            joining += [(number, segment.noise_multiplier) for number in inside]
            joining += [(-1, segment.noise_multiplier)] if high - low > len(again) + len(inside) else []
            found[alone(segment.noise_multiplier)] += len(again)
        found.update(own.change(own.dearest_with(joining)))
    return Counter({release: count for release, count in found.items() if count})


def _inside(numbers: Collection[int], low: int, high: int) -> list[int]:
    few = high - low < len(numbers)
    return [n for n in range(low, high) if n in numbers] if few else [n for n in numbers if low <= n < high]


def _pieces(plan: Plan, step: int, end: int) -> list[tuple[Segment, int, int]]:
    """Cut the steps `step` to `end - 1` at segment ends; return each part as (segment, first step, last step + 1)."""
    pieces = []
    while step < end:
        segment = plan.at(step)
        pieces.append((segment, step, min(segment.end, end)))
        step = segment.end
    return pieces


def room(
    plan: Plan, ledger: Contents, step: int, partition: str | None = None, run: str | None = None, begins: bool = False
) -> int:
    """Return how many steps the target and filter allow from `step` on.  `partition` is the `label` of `ahead`."""
    name = ledger.run if run is None else run
    own, left = ledger.runs.get(name, Spent()), plan.steps - step
    if plan.target_epsilon is None and plan.filter is None:
        return left
    held, others = _held(plan, ledger, name)
    if not _filter_leaves_room(plan, ledger, name):
        return 0
    more = lambda steps: held + ahead(plan, own, step, steps, partition, begins)
    if not others and plan.within and more(left) <= plan.whole:
        return left
    several = [replace(ledger.runs[each], releases=Counter()) for each in counted(plan, ledger, name)]
    beside = [total(several)] if any(one.others for one in several) else []
    if plan.early_stop is not None and not own.has_early_stop(plan):
        beside.append(plan.early_stop.mechanism)
    return furthest(lambda steps: plan.holds(compose(*beside, composed(fewer(more(steps))))), left)


def _held(plan: Plan, ledger: Contents, run: str) -> tuple[Counter[Release], Counter[Mechanism]]:
    """Return what counts before a run's next steps: (counts of training releases, counts of other mechanisms)."""
    names = counted(plan, ledger, run)
    plans = [line.plan for name in names for line in ledger.headers[name]]
    one_filter(plan, plans)
    one_unit(plan, plans)
    one_relation(plan.relation, plans)
    held: Counter[Release] = Counter()
    others: Counter[Mechanism] = Counter()
    for name in names:
        spent = ledger.runs[name]
        held += spent.releases + (spent.owed if name == run else ledger.promised(name))
        others += spent.others
    if plan.early_stop is not None and ledger.runs.get(run, Spent()).has_early_stop(plan):
        others -= Counter([plan.early_stop.mechanism])  # the plan's own cost includes this mechanism already
    return held, others


def _filter_leaves_room(plan: Plan, ledger: Contents, run: str) -> bool:
    """Return whether a plan with a filter meets its target if the run costs the largest of its filters' budgets."""
    if plan.filter is None or plan.target_epsilon is None:
        return True
    beside = [(ledger.counting(name), ledger.headers[name]) for name in counted(plan, ledger, run) if name != run]
    filters = [each for each in ledger.headers.get(run, []) if each.plan.filter not in (None, plan.filter)]
    claimed = [(Spent(), [*filters, Run(run, "", plan)]), *beside]
    return not (filters or beside) or bool(
        claim(claimed, plan.target_delta, plan.relation).upper <= plan.target_epsilon
    )


def counted(plan: Plan, ledger: Contents, run: str | None = None) -> list[str]:
    """Return the names of the runs that count against a plan: all runs, or only `run` if the plan has repetitions."""
    name = ledger.run if run is None else run
    return [each for each in ledger.runs if plan.repetitions is None or each == name]


def one_filter(plan: Plan, others: Iterable[Plan]) -> None:
    """Raise InputError if another plan has a Rényi filter, unless this plan has a filter of the same order."""
    orders = {other.filter.order for other in others if other.filter}
    if orders - {plan.filter.order if plan.filter else None}:
        raise InputError("the ledger has a Renyi filter of another order; nothing can be certified on top of it")


def one_relation(relation: str, others: Iterable[Plan]) -> None:
    found = sorted({other.relation for other in others} - {relation})
    if found:
        raise InputError(f"relation = {relation!r}, but spending is under {found[0]!r}; use one relation for both")


def one_unit(plan: Plan, others: Iterable[Plan]) -> None:
    units = {other.unit for other in others} - {plan.unit}
    if units:
        raise InputError(
            f"unit = {plan.unit!r}, but what was spent before is for unit = {units.pop()!r}: a record's guarantee is "
            "none for a user; use one unit for both"
        )


def furthest(holds: Callable[[int], bool], most: int) -> int:
    """Return the largest number of steps, from 1 to `most`, for which `holds` is true; 0 if there is none."""
    if most < 1 or not holds(1):
        return 0
    if holds(most):
        return most
    return bisect.bisect_left(range(most), True, 2, most, key=lambda steps: not holds(steps)) - 1
