"""`tune` and `tune_with`: train K candidates, release the best, all of it within one budget."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from jaxacct.core.progress import Progress
from jaxacct.core.validation import InputError, check_one
from jaxacct.mechanisms import Mechanism
from jaxacct.selection import Law
from jaxacct.selection.top import TOP
from jaxacct.training.ledger import Ledger
from jaxacct.training.plan import Plan
from jaxacct.training.step.private_loss import PrivateLoss
from jaxacct.tuning.adaptive_search import Adaptive, in_turn
from jaxacct.tuning.best_candidate import best_few
from jaxacct.tuning.candidate_runs import Runs, Winner
from jaxacct.tuning.keys_and_ledger import Secret, note_whole
from jaxacct.tuning.matched_plan import MatchedPlan
from jaxacct.tuning.padding import numbers_to_train
from jaxacct.tuning.private_score import PrivateScore, whole
from jaxacct.tuning.search_plan import SearchPlan
from jaxacct.tuning.tuned import Prepared, Tuned, law_of, taken_for, value_of

__all__ = ["tune", "tune_with"]


def tune(
    loss_fn: Callable[..., Any],
    make_optimizer: Callable[[Mapping[str, Any]], Any],
    space: Any,
    data: Any,
    plan: Plan | MatchedPlan | SearchPlan,
    *,
    init: Callable[[Any], Any],
    score: Callable[[Any], Any] | PrivateScore,
    candidates: str | None = None,
    top: int | None = None,
    pad: int | None = None,
    clip_norm: Any = 1.0,
    method: str = "auto",
    micro_batch: int | None = None,
    rngs: bool = False,
    trainable: Any = None,
    private_loss: PrivateLoss | None = None,
    ledger: Ledger | str | os.PathLike[str] | None = None,
    key: bytes | None = None,
    progress: bool | None = None,
) -> Tuned:
    """Train K candidates by DP-SGD, K random and secret, and release the best; (epsilon, delta) covers the search.

    The noise is that of the plan, ``Plan(target_epsilon=..., repetitions=law, ...)``, which meets its target by all K
    runs together: the exact worst case over scores, for the plan's neighbouring relation.  K, the losers and their
    scores stay in this function: no log, no checkpoint, no entry in a ledger of any one candidate.  One entry for the
    whole is on the disk before the first candidate is trained.

    Parameters
    ----------
    loss_fn : callable
        (params, example) -> scalar; with rngs (params, example, key).
    make_optimizer : callable
        config -> Optax transformation.  Candidates with equal words (such as the optimizer's name) train side by side,
        16 at a time, with their numbers traced; "clip_norm" in a config is the clip norm.
    space : Space or Adaptive
        With ``sample(key) -> {name: value}``, such as `Random`, `Grid` or `grid`; independent of the data.  Or an
        `Adaptive` search, whose proposals depend on what was tried before; it counts as adaptive.
    data : pytree of arrays
        The plan's dataset_size examples along the first axis.
    plan : Plan, MatchedPlan or SearchPlan
        With repetitions; a `MatchedPlan` where candidates are to differ in sampling probability and length too, a
        `SearchPlan` for several winners.
    init : callable
        JAX key -> first parameters, of the same shapes for all.
    score : callable or PrivateScore
        params -> a number, larger is better, of public data only; or a PrivateScore.  NaN ranks below -inf, and equal
        scores go to the candidate drawn first: one rule for every K.  An exception in training or scoring a candidate
        is a NaN, and nothing of it is shown; try both on made-up data before.
    candidates : {"iid", "adaptive"}, optional
        As for `selection.select`.  Left out, it is "iid" for a `Grid`, and for a `Random` with the library's
        distributions, unless the plan is for adaptive ones; it is "adaptive" for any other space, which may keep state.
        "iid" declares that every draw of the space is independent and from one law; `Tuned.candidates` and the ledger
        say so.
    top : int, optional
        How many of the best are released, in `Tuned.winners`; by default what the plan is for, else 1.
    pad : int, optional
        How long this takes reveals K, which no guarantee covers where the time can be observed.  With pad = n always n
        candidates are trained and scored, and those beyond K thrown away.  The law must be one with K <= n, such as
        ``truncated(law, n)``, for which the plan then accounts.  Progress is shown only with pad, and of an `Adaptive`
        search, which pays for a public K.
    clip_norm, method, micro_batch, rngs, trainable, private_loss
        As for `side_by_side`.
    ledger : path or Ledger, optional
        What it holds already counts against the plan's target.
    key : bytes, optional
        32 secret bytes for all randomness but K, by default from the operating system; never for two tunings.
    progress : bool, optional
        A line on standard error, only with pad; None only on a terminal.

    Returns
    -------
    Tuned

    Raises
    ------
    InputError
        A plan without repetitions, with a target that the whole with its private score or with what the ledger holds
        exceeds, or whose law passes `pad`; data of another size.

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
    law = law_of(plan, space, pad)
    top = int(check_one("top", getattr(plan, "top", 1) if top is None else top, TOP, "one number for all"))
    rounds = getattr(plan, "rounds", 1)
    if rounds > 1:
        raise InputError(f"plan is for {rounds} rounds; use tuning.tune_in_rounds")
    prepared = Prepared.of(plan, law, space, candidates, score, data, top, 1)
    secret = Secret(key)
    note = f"tuning: a selection among runs of the plan; candidates {prepared.word}" + (
        f"; the best {top}" if top > 1 else ""
    )
    note_whole(ledger, prepared.plans[0], prepared.cost.mechanism, note, plan.target_epsilon)
    shared = {"clip_norm": clip_norm, "method": method, "micro_batch": micro_batch}
    shared |= {"rngs": rngs, "trainable": trainable, "private_loss": private_loss}
    value = functools.partial(value_of, prepared.score)
    runs = Runs(loss_fn, make_optimizer, data, prepared.plans, init, value, shared)
    winners, nothing = runs.best(space, law, pad, top, secret, progress)
    return prepared.released(winners, nothing)


def tune_with(
    train: Callable[[dict[str, Any], Any], Any],
    space: Any,
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
    """Tune with your own ``train(config, key) -> result``, whatever its shapes, one candidate after the other.

    Parameters
    ----------
    train : callable
        (config, key) -> result.
    space, top, pad, key, progress
        As for `tune`; `Tried.result` is the result of `train`.
    mechanism : Mechanism
        What one call of `train` costs, whatever the configuration.  The guarantee is as good as this claim.  It holds
        only if `train` shows nothing but its result.  That it raises an exception is part of that; what the exception
        says is not shown.  Include the score if it looks at private data.
    repetitions : Law
        One law of K.
    target_delta : float in (0, 1)
    score : callable
        result -> a number.
    relation : str
        As for `ja.epsilon`.
    candidates : {"adaptive", "iid"}
        "adaptive": `train` and `space` may remember what came before, warm starts and pruning included, and `mechanism`
        is what a call costs whatever came before.  "iid" declares that they do not: every call of `space.sample` and of
        `train` is independent of all others and has one law, and the score is of the candidate's own result.  A list
        tried in order, shuffled lists and samplers with state are not i.i.d.
    ledger : Ledger, optional
        An open one.

    Returns
    -------
    Tuned
        `params` is the winner's result, None with status "none".  The noise for a target is
        `ja.calibrate_noise_multiplier(..., repetitions=law, candidates=...)`.

    Raises
    ------
    InputError
        Invalid values, or a law that passes `pad`.

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
    kind, word = taken_for(candidates, space)
    word = "iid, declared" if kind == "iid" else kind  # of `train` it is the user's word in any case
    several = int(check_one("top", top, TOP, "one number for all"))
    if pad is not None and isinstance(space, Adaptive):
        raise InputError(
            f"pad = {pad!r} is for a secret K; leave it out, since an Adaptive search pays for a public one"
        )
    cost = whole(mechanism, repetitions, None, target_delta, relation, candidates=kind, top=several)
    secret = Secret(key)
    if ledger is not None:
        ledger.spend(cost.mechanism, f"tuning: a selection among runs of one mechanism; candidates {word}")
    count, work = numbers_to_train(repetitions, pad)
    value = lambda result, _: float(score(result))
    train_one = lambda config, number: train(dict(config), secret.key(b"train", number))
    if isinstance(space, Adaptive):
        bar = Progress(count, progress, unit="candidates")
        turns = in_turn(space, count, train_one, value, several, secret, bar)
        winners = [Winner(result, config, won) for config, _, result, won in turns]
        first = winners[0].config if winners else space.proposed([], secret.key(b"config", 0))
    else:
        configs = [dict(space.sample(secret.key(b"config", number))) for number in range(max(work, 1))]
        one_by_one = lambda numbers: [train_one(configs[number], number) for number in numbers]
        bar = Progress(work, progress if pad else False, unit="candidates")
        found = best_few([None] * work, lambda _: one_by_one, value, count, several, bar, together=1)
        winners, first = [Winner(result, configs[n], won) for n, result, won in found], configs[0]
    return Prepared((), score, cost, word).released(winners, Winner(None, first, float("nan")))
