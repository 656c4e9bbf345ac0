"""Tuning: `tune`, `tune_in_rounds` and `tune_with` train K candidates and release the best within one budget."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.core.bounds import Bounds
from jaxacct.core.progress import waiting
from jaxacct.core.types import Leaf, PyTree
from jaxacct.core.validation import COUNT, InputError, check_one, choice
from jaxacct.mechanisms import Mechanism
from jaxacct.selection import Law
from jaxacct.selection.mechanism import CANDIDATES
from jaxacct.selection.top import TOP
from jaxacct.training.ledger import Ledger
from jaxacct.training.ledger.contents import Spent, claim, one_relation
from jaxacct.training.ledger.format import Run
from jaxacct.training.plan import Plan
from jaxacct.training.run.evaluations import refuse_shared, units
from jaxacct.training.run.run_ledger import Given, require_same_relation
from jaxacct.training.run.state import Released
from jaxacct.training.source import require_rows
from jaxacct.training.step.counts_and_losses import PrivateLoss
from jaxacct.training.step.models import initialised, is_equinox, is_nnx, loss_of, refuse_state
from jaxacct.tuning.candidates import (
    CANDIDATES_PER_CALL,
    Adaptive,
    Group,
    Secret,
    Winner,
    drawn,
    rank,
    require_pad,
    require_side_by_side,
    selected,
    several,
    side_by_side,
)
from jaxacct.tuning.plans import MatchedPlan, SearchPlan
from jaxacct.tuning.private_score import PrivateScore, Whole, noisy, whole, with_noise
from jaxacct.tuning.search_spaces import Sampled, draws_alike

TRIALS = 32
"""Number of trial candidates.  For one candidate of each kind, a step is traced before anything is spent."""


@dataclass(frozen=True, eq=False, repr=False)
class Tuned(Released):
    """Release of a tuning, all of it covered by `epsilon`.

    Parameters
    ----------
    params, config, score : the winner's parameters (a pytree), hyper-parameters, and score (NaN with status "none").
    status : "tuned"; "none" if K was 0 or all winners raised an exception: then params and config depend on no data.
    epsilon, mechanism : epsilon of the whole tuning at the plan's delta; the tuning as one mechanism, as in the ledger.
    plan : the plan of the winner's training; None in `tune_with`.
    candidates : the assumption of the claim: "iid", "iid, declared" if only the user declares it, or "adaptive".
    winners : the best `top` candidates, best first, round after round in `tune_in_rounds`; empty with status "none".
    target_delta, relation : the delta and the neighbouring relation for which `epsilon` holds.

    >>> import jaxacct as ja
    >>> run = ja.Gaussian(2.0)
    >>> Tuned(np.zeros(2), {"rate": 0.1}, 0.9, "tuned", ja.epsilon(run, 1e-5), run, target_delta=1e-5)
    Tuned(tuned, {'rate': 0.1}, score 0.9, epsilon <= 1.993092 at delta 1e-05, 2 parameters)
    """

    params: Leaf
    config: dict[str, Any]
    score: float
    status: str
    epsilon: Bounds
    mechanism: Mechanism
    plan: Plan | None = None
    candidates: str = "iid"
    winners: tuple[Winner, ...] = ()
    target_delta: float | None = None
    relation: str = "add_or_remove_one"


def tune(
    loss_fn: Callable[..., Any],
    make_optimizer: Callable[[Mapping[str, Any]], Any],
    space: Sampled | Adaptive,
    data: PyTree,
    plan: Plan | MatchedPlan | SearchPlan,
    *,
    init: Callable[[Any], Any] | None = None,
    score: Callable[[Any], Any] | PrivateScore,
    loss: Callable[[Any, Any], Any] | None = None,
    candidates: str | None = None,
    top: int | None = None,
    pad: int | None = None,
    clip_norm: PyTree = 1.0,
    method: str = "auto",
    micro_batch: int | None = None,
    rngs: bool = False,
    trainable: PyTree = None,
    private_loss: PrivateLoss | None = None,
    ledger: Ledger | str | os.PathLike[str] | None = None,
    key: bytes | None = None,
    progress: bool | None = None,
) -> Tuned:
    """Train K candidates by DP-SGD and release the best; (epsilon, delta) covers the whole search.

    The plan, ``Plan(target_epsilon=..., repetitions=law, ...)``, gives the noise with which all K runs together meet
    the target, whatever the score.  K is random.  K, the losers and their scores stay secret: no log, checkpoint or
    ledger entry is about a single candidate.  One ledger entry for the tuning is on the disk before training.

    Parameters
    ----------
    loss_fn : (params, example[, key with rngs]) -> scalar; or a linen module, with ``loss``, for pairs (input, target).
    make_optimizer : config -> Optax transformation.  Candidates whose configs have equal words (such as the optimizer's
        name) train side by side, 16 at a time, with traced numbers.  "clip_norm" in a config is the clip norm.
    space : has ``sample(key) -> {name: value}``, such as `Random`, `Grid` or `grid`; draws must not depend on the data.
        Or an `Adaptive` search, which proposes candidates from the results of earlier ones and counts as adaptive.
    data : pytree of arrays, with plan.dataset_size examples along the first axis.
    plan : a Plan with repetitions; a `MatchedPlan` for several rates or lengths; a `SearchPlan` for several winners.
    init : JAX key -> initial parameters, of equal shapes for all keys.  May be left out for a linen module.
    loss : (output, target) -> scalar, for a module, as for the Trainer.
    score : params -> a number that depends on public data only; or a PrivateScore.  The largest score wins; in
        a tie, the first.  An exception counts as NaN, the lowest, and is not shown: test functions on made-up data.
    candidates : "iid" or "adaptive", as for `selection.select`.  By default "iid" for a `Grid`, and for a `Random` with
        the library's distributions, unless the plan is for adaptive candidates; else "adaptive".  "iid" declares that
        all draws of the space are independent and from one law, and is noted in `Tuned.candidates` and in the ledger.
    top : number of the best candidates that are released, in `Tuned.winners`; by default `plan.top`, else 1.
    pad : the number n of candidates that are always trained and scored; those beyond K are dropped.  The plan's law
        must have K <= n, such as ``truncated(law, n)``.  Without pad the running time reveals K, unaccounted for.
    clip_norm, method, micro_batch, rngs, trainable, private_loss : as for `side_by_side`.
    ledger : a path or a Ledger; its entries count against the plan's target.
    key : 32 secret bytes for all randomness but K, by default from the operating system; never use them twice.  With
        other data or another plan they give other noise, but not with another loss.
    progress : whether to show a line; None: on a terminal.  Without pad only `Adaptive`, where K is public, shows it.

    Returns
    -------
    Tuned

    Raises
    ------
    InputError : before anything is spent, if the tuning, alone or with the ledger's entries, exceeds the plan's target.
        Before that, `tune` traces a step of one trial candidate of each kind, and shows errors of your functions.

    References
    ----------
    README.md of this folder, "What is guaranteed"; jaxacct/selection/README.md, "The worst score".

    >>> import jax.numpy as jnp, numpy as np, optax
    >>> from jaxacct import selection, tuning
    >>> plan = Plan(target_delta=1e-5, dataset_size=100, sampling_probability=1.0, steps=2, noise_multiplier=2.5,
    ...     repetitions=selection.PointMass(2))  # with target_epsilon the noise is solved for
    >>> best = tune(lambda w, x: jnp.sum((w - x) ** 2), lambda c: optax.sgd(c["rate"]), tuning.grid(rate=[0.01, 0.1]),
    ...     np.ones((100, 2)), plan, init=lambda key: jnp.zeros(2), score=lambda w: -jnp.sum((w - 1.0) ** 2))
    >>> best.status, sorted(best.config), bool(best.epsilon.upper <= 4.0)
    ('tuned', ['rate'], True)
    """
    given = locals()
    top = int(check_one("top", getattr(plan, "top", 1) if top is None else top, TOP, "one number for all"))
    if (rounds := getattr(plan, "rounds", 1)) > 1:
        raise InputError(f"plan is for {rounds} rounds; use tuning.tune_in_rounds")
    return _tuned(given, top, 1, None)


def tune_in_rounds(
    loss_fn: Callable[..., Any],
    make_optimizer: Callable[[Mapping[str, Any]], Any],
    space: Sampled | Adaptive,
    data: PyTree,
    plan: SearchPlan | Plan,
    *,
    update: Callable[[tuple[Winner, ...]], Any],
    init: Callable[[Any], Any] | None = None,
    score: Callable[[Any], Any] | PrivateScore,
    loss: Callable[[Any, Any], Any] | None = None,
    rounds: int | None = None,
    candidates: str | None = None,
    pad: int | None = None,
    clip_norm: PyTree = 1.0,
    method: str = "auto",
    micro_batch: int | None = None,
    rngs: bool = False,
    trainable: PyTree = None,
    private_loss: PrivateLoss | None = None,
    ledger: Ledger | str | os.PathLike[str] | None = None,
    key: bytes | None = None,
    progress: bool | None = None,
) -> Tuned:
    """Tune in rounds, like batched Bayesian optimisation: each round's winner is public and shapes the next space.

    Every round draws a fresh, secret K, trains K candidates from the round's space, and releases the best.  `update`
    makes the next space from all winners so far.  The cost is the composition of the rounds, far less than that of
    adaptive candidates.  It is in the ledger before the first candidate is trained: stopping early does not lower it.

    Parameters
    ----------
    loss_fn, make_optimizer, data, init, loss, pad, key, progress, ledger : as for `tune`.
    clip_norm, method, micro_batch, rngs, trainable, private_loss : as for `tune`.
    space : the space of the first round.
    plan : a `SearchPlan` with `rounds`, which solves for the noise; or a Plan with repetitions and a noise multiplier.
    update : (winners so far, in order) -> the space of the next round, or None to stop.  The function must use nothing
        else that depends on the data.  A round that releases nothing adds no winner.
    score : as for `tune`; a PrivateScore needs its noise multiplier.
    rounds : number of rounds; by default `plan.rounds`, else 1.
    candidates : as for `tune`.  "iid" declares that in every round the draws of the space are i.i.d.

    Returns
    -------
    Tuned : the winner with the best score; all winners are in `Tuned.winners`.

    Raises
    ------
    InputError : before spending, if the rounds exceed the target; later, if a space is adaptive and the plan is not.

    References
    ----------
    jaxacct/selection/README.md, "Rounds"; README.md of this folder, "Searches that look at what came before".

    >>> import jax.numpy as jnp, numpy as np, optax
    >>> from jaxacct import selection, tuning
    >>> plan = Plan(target_delta=1e-5, dataset_size=100, sampling_probability=1.0, steps=2, noise_multiplier=2.5,
    ...     repetitions=selection.PointMass(2))  # a SearchPlan solves for the noise
    >>> best = tune_in_rounds(lambda w, x: jnp.sum((w - x) ** 2), lambda c: optax.sgd(c["rate"]),
    ...     tuning.grid(rate=[0.01, 0.1]), np.ones((100, 2)), plan, rounds=2,
    ...     update=lambda winners: tuning.grid(rate=[winners[-1].config["rate"], 0.2]),
    ...     init=lambda key: jnp.zeros(2), score=lambda w: -jnp.sum((w - 1.0) ** 2))
    >>> len(best.winners), best.status
    (2, 'tuned')
    """
    given = locals()
    if not callable(update):
        raise InputError(f"update = {update!r:.40} must be a function of the winners that gives the next space")
    count = getattr(plan, "rounds", 1) if rounds is None else rounds
    count, top = int(check_one("rounds", count, COUNT, "one number for all")), int(getattr(plan, "top", 1))
    return _tuned(given, top, count, update)


def tune_with(
    train: Callable[[dict[str, Any], Any], Any],
    space: Sampled | Adaptive,
    mechanism: Mechanism,
    repetitions: Law,
    *,
    target_delta: float,
    score: Callable[[Any], Any],
    relation: str = "add_or_remove_one",
    candidates: str = "adaptive",
    top: int = 1,
    pad: int | None = None,
    ledger: Ledger | None = None,
    key: bytes | None = None,
    progress: bool | None = None,
) -> Tuned:
    """Tune with your own ``train(config, key) -> result``, one candidate after the other; shapes may differ.

    Parameters
    ----------
    train, score : (config, key) -> result; result -> a number.
    space, top, pad, key, progress : as for `tune`.  For an `Adaptive` search, `Tried.result` is the result of `train`.
    mechanism : the cost of one call of `train`, whatever the configuration, plus that of a score on private data.  The
        library cannot check this.  `train` must reveal nothing but its result, and whether it raises an exception.
    repetitions, target_delta : one law of K, and a number in (0, 1).
    relation, ledger : as for `ja.epsilon`; an open Ledger.
    candidates : "adaptive": `train` and `space` may remember earlier candidates, and `mechanism` is the cost of a call
        whatever came before.  "iid" declares that all calls of `space.sample` and `train` are independent and from one
        law (unlike lists, shuffled or not, and samplers with state), and that no score depends on other candidates.

    Returns
    -------
    Tuned : `params` is the winner's result; with status "none" it is None.

    To find the noise for a target, use `ja.calibrate_noise_multiplier(..., repetitions=law, candidates=...)`.

    References
    ----------
    README.md of this folder, "What is guaranteed"; jaxacct/selection/README.md, "Candidates that depend on each other".

    >>> import jaxacct as ja
    >>> from jaxacct import selection, tuning
    >>> best = tune_with(lambda config, key: config["x"], tuning.grid(x=[1, 2]), ja.Gaussian(2.0),
    ...     selection.PointMass(3), target_delta=1e-5, score=float)
    >>> best.status, best.params == best.config["x"], best.epsilon.kind, best.candidates
    ('tuned', True, 'certified', 'adaptive')
    """
    kind, word = _taken_for(candidates, space)
    # the code cannot check that the runs of `train` are i.i.d., so "iid" is always the user's declaration
    word = "iid, declared" if kind == "iid" else kind
    several_best = int(check_one("top", top, TOP, "one number for all"))
    cost = whole(mechanism, repetitions, None, target_delta, relation, candidates=kind, top=several_best)
    require_pad(repetitions, space, pad)
    secret = Secret(key)
    if ledger is not None:
        if not isinstance(ledger, Ledger):
            raise InputError(f"ledger = {ledger!r:.60} must be an open Ledger; use training.Ledger.open(path)")
        one_relation(relation, [line.plan for lines in ledger.headers.values() for line in lines])
        ledger.spend(cost.mechanism, f"tuning: a selection among runs of one mechanism; candidates {word}")

    def one_by_one(_: Any, configs: Sequence[Mapping[str, Any]]) -> Group:
        return lambda numbers: [train(dict(configs[number]), secret.key(b"train", number)) for number in numbers]

    alike, value = lambda *_: None, lambda result, _: float(score(result))
    found, configs = selected(
        space, repetitions, pad, several_best, secret, progress, alike, one_by_one, value, together=1
    )
    winners = [Winner(result, configs[number], won) for number, result, won in found]
    return _released(winners, Winner(None, configs[0], float("nan")), cost, word)


def _model(
    loss_fn: Any, loss: Callable[[Any, Any], Any] | None, rngs: bool, init: Callable[[Any], Any] | None, data: Any
) -> tuple[Callable[..., Any], Callable[[Any], Any]]:
    """Return functions (params, example) -> loss and key -> params. With `loss` given, `loss_fn` is a linen module."""
    if loss is None:
        if init is None:
            raise InputError("init is missing; give a function of a JAX key, or a linen module with loss")
        return loss_fn, init
    if is_nnx(loss_fn) or is_equinox(loss_fn):
        raise InputError(
            "loss_fn is a module of nnx or Equinox, must be linen's; give a function (params, example) -> loss and init"
        )
    inputs = data[0] if isinstance(data, tuple | list) else None
    example = jax.tree.map(lambda a: np.zeros(np.shape(a)[1:], jnp.result_type(a)), inputs)

    def first(key: Any) -> Any:
        params = initialised(loss_fn, key, example, rngs, None)
        refuse_state(loss_fn, params)
        return params

    return loss_of(loss_fn, loss, rngs, None), init or first


def _tuned(given: Mapping[str, Any], top: int, count: int, update: Callable[[tuple[Winner, ...]], Any] | None) -> Tuned:
    """Run `tune` with its arguments `given`, or `tune_in_rounds` if there is an `update`."""
    make_optimizer, data, plan = (given[name] for name in ("make_optimizer", "data", "plan"))
    loss_fn, init = _model(given["loss_fn"], given["loss"], given["rngs"], given["init"], data)
    space, score, candidates, pad = (given[name] for name in ("space", "score", "candidates", "pad"))
    of_step = ("clip_norm", "method", "micro_batch", "rngs", "trainable", "private_loss")
    shared = {name: given[name] for name in of_step}
    law = getattr(plan, "repetitions", None)
    if not isinstance(law, Law):
        raise InputError("plan has no repetitions; make it with repetitions=law, so that its noise covers all K runs")
    planned = getattr(plan, "candidates", "iid")
    kind, word = _taken_for(candidates or ("adaptive" if planned == "adaptive" else None), space)
    require_pad(law, space, pad)
    for name, one in {"loss_fn": loss_fn, "make_optimizer": make_optimizer, "init": init, "score": score}.items():
        if not callable(one) and not isinstance(one, PrivateScore):
            raise InputError(f"{name} = {one!r:.40} must be a function; see the docstring of tuning.tune")
    plans = getattr(plan, "plans", (plan,))
    require_rows(data, plan.dataset_size)
    refuse_other_neighbours(given["ledger"], plans[0])
    score = with_noise(score, plan, kind, top, count)
    as_planned = (top, count) == (getattr(plan, "top", 1), getattr(plan, "rounds", 1))
    known = plan.epsilon if as_planned and kind == planned else None
    secret = Secret(given["key"], (data, getattr(score, "data", None)), plan.mechanism)
    with waiting(None, "answers: what the tuning costs", given["progress"]):
        cost = whole(plan.mechanism, law, score, plan.target_delta, plan.relation, known, kind, top, count)
    if plan.target_epsilon is not None and not cost.epsilon.upper <= plan.target_epsilon:
        raise InputError(_too_much(float(cost.epsilon.upper), plan.target_epsilon, kind != planned, as_planned))
    what, more = "a selection", f"; the best {top}" if top > 1 else ""
    if update is not None:
        what, more = f"{count} rounds of a selection", ""
        # `_taken_for` saw only the space of the first round.  For later spaces "iid" is the user's declaration.
        word = "iid, declared" if candidates == "iid" else word
    for each in plans:
        require_side_by_side(each, **shared)
    scored_on = score.data if isinstance(score, PrivateScore) else ()
    if isinstance(score, PrivateScore) and score.on == "validation":
        refuse_shared("score.data", scored_on, data, "; use on='training', which counts both, or data apart from them")
    programs: dict[Any, Any] = {}  # all rounds share the compiled programs

    def words_of(config: Mapping[str, Any]) -> Hashable:
        return tuple((name, x) for name, x in config.items() if x is None or isinstance(x, str))

    def training(kind: Any, secret: Secret, configs: Sequence[Mapping[str, Any]], trial: bool = False) -> Group:
        if kind not in programs:
            optimizer = lambda numbers: make_optimizer({**numbers, **dict(kind[1])})
            programs[kind] = side_by_side(loss_fn, optimizer, plans[kind[0]], **shared)
        return several(lambda *given: programs[kind](*given, data, scored_on, trial), secret, init, configs)

    # Trial candidates show errors of the program before anything is spent.  None is trained, and no K is drawn yet.
    # If candidates count as i.i.d., none may depend on whether an error was shown: so trial candidates are extra ones.
    opening = secret if update is None else Secret(secret.root(b"round", 0))
    trial = Secret(secret.root(b"trial")) if kind == "iid" else opening
    tried = [drawn(space, trial, number) for number in range(TRIALS if kind == "iid" else 1)]
    many = 1 if isinstance(space, Adaptive) else CANDIDATES_PER_CALL
    for words, number in {words_of(config): number for number, config in enumerate(tried)}.items():
        params = training((0, words), trial, tried, True)([number] * many)[0]
    if isinstance(score, PrivateScore):
        jax.eval_shape(lambda params: units(score.value, params, scored_on, score.unit, data), params)
    note = f"tuning: {what} among runs of the plan; candidates {word}{more}"
    note_whole(given["ledger"], plans[0], cost.mechanism, note, plan.target_epsilon)

    def best_of(space: Any, secret: Secret, first: Any = None) -> tuple[list[Winner], Winner]:
        """Return the winners of one selection, and a data-independent Winner to release if there are no winners."""
        place = lambda number: secret.choice(b"setting", number, len(plans))
        kind_of = lambda config, number: (place(number), words_of(config))
        group = lambda kind, configs: training(kind, secret, configs)
        value = value_of(score, secret, data)
        found, configs = selected(space, law, pad, top, secret, given["progress"], kind_of, group, value, first=first)
        winners = [Winner(params, configs[number], won, plans[place(number)]) for number, params, won in found]
        first = jax.device_get(init(secret.key(b"init", 0)))
        return winners, Winner(first, configs[0], float("nan"), plans[place(0)])

    winners, nothing = best_of(space, opening, None if kind == "iid" else tried[0])
    if update is None:
        return _released(winners, nothing, cost, word)
    for number in range(1, count):
        space = update(tuple(winners))
        if space is None:
            break
        if _taken_for(candidates, space)[0] != "iid" and word != "adaptive":
            raise InputError(
                f"the space of round {number + 1} may keep state and its candidates count as adaptive, while the plan "
                "counts i.i.d. ones; give a Grid or a Random, or a SearchPlan with candidates='adaptive'"
            )
        winners += best_of(space, Secret(secret.root(b"round", number)))[0]
    return _released(winners, nothing, cost, word)


def _released(winners: Sequence[Winner], nothing: Winner, cost: Whole, word: str) -> Tuned:
    """Return the release of all winners. Its `params`, `config`, `score` and `plan` are those of the best winner."""
    best = max(enumerate(winners), key=lambda one: rank(one[1].score, one[0]))[1] if winners else nothing
    status = "tuned" if winners else "none"
    fields = (best.params, best.config, best.score, status, cost.epsilon, cost.mechanism, best.plan, word)
    return Tuned(*fields, tuple(winners), cost.delta, cost.relation)


def _taken_for(declared: str | None, space: Any) -> tuple[str, str]:
    """Return "iid" or "adaptive", and the word in the release: "iid, declared" if "iid" is only the user's claim."""
    known = not isinstance(space, Adaptive) and draws_alike(space)
    if isinstance(space, Adaptive) and declared == "iid":
        raise InputError(
            "candidates = 'iid' does not hold for an Adaptive search; leave it out, or use candidates='adaptive'"
        )
    usual = "iid" if known else "adaptive"
    kind = usual if declared is None else choice("candidates", declared, CANDIDATES)
    return kind, "iid, declared" if kind == "iid" and not known else kind


def _too_much(cost: float, target: float, unplanned: bool, as_planned: bool) -> str:
    """Return the error message for a tuning whose epsilon `cost` exceeds the plan's target, with the remedy."""
    if unplanned:
        return (
            f"candidates = 'adaptive' cost epsilon {cost!r} with this plan, above the plan's target {target!r}; "
            "make the plan with candidates='adaptive', or declare candidates='iid' if all draws of the space are "
            "independent and from one law"
        )
    if not as_planned:
        return (
            f"the whole costs epsilon {cost!r}, above the plan's target {target!r}; make a tuning.SearchPlan with "
            "these rounds and winners, which solves for their noise"
        )
    return (
        f"the whole with its private score costs epsilon {cost!r}, above the plan's target "
        f"{target!r}; make the plan for a lower target, or give the score more noise"
    )


def value_of(score: Any, secret: Secret, private: Any = ()) -> Callable[[Any, int], float]:
    """Return the function (params, number) -> score of candidate `number`."""
    if not isinstance(score, PrivateScore):
        return lambda params, _: float(score(params))
    held = jax.tree.map(jax.numpy.asarray, score.data)
    count = jax.jit(lambda params: units(score.value, params, held, score.unit, private))
    return lambda params, number: noisy(count(params), secret.key(b"score", number), score.noise_multiplier, score.unit)


def refuse_other_neighbours(ledger: Given, plan: Plan) -> None:
    """Raise InputError if the ledger exists and its plans are for another relation or unit than `plan`."""
    if ledger is not None and (isinstance(ledger, Ledger) or os.path.exists(ledger)):
        headers = (ledger if isinstance(ledger, Ledger) else Ledger.read(ledger)).headers
        require_same_relation(plan, [line.plan for lines in headers.values() for line in lines])


def note_whole(ledger: Given, plan: Plan, mechanism: Mechanism, note: str, target: float | None) -> None:
    """Write a tuning into the ledger. Refuse it if the ledger's epsilon would pass `target` or the relations differ."""
    if ledger is None:
        return
    opened: contextlib.AbstractContextManager[Ledger]
    if isinstance(ledger, Ledger):
        opened = contextlib.nullcontext(ledger)
    else:
        opened = Ledger.open(ledger) if os.path.exists(ledger) else Ledger.create(ledger, plan)
    with opened as one:
        refuse_other_neighbours(one, plan)
        several = [(one.counting(name), headers) for name, headers in one.headers.items()]
        if target is not None and any(spent.releases or spent.others for spent, _ in several):
            several.append((Spent(others=Counter([mechanism])), [Run("", "", plan)]))
            upper = float(claim(several, plan.target_delta, plan.relation).upper)
            if not upper <= target:
                raise InputError(
                    "ledger holds releases already (a tuning counts, finished or not): with this one they would cost "
                    f"epsilon {upper!r}, above the plan's target {target!r}; use a ledger of its own if the data are "
                    "others, or plan for what is left"
                )
        one.spend(mechanism, note)
