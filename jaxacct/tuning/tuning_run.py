"""`tune`: draw K in secret, train K candidates, release the best, all of it within one budget.

More than 300 lines, of which 130 are the docstrings of its two public functions.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from jaxacct.bounds import Bounds
from jaxacct.mechanisms import Mechanism
from jaxacct.progress import Progress
from jaxacct.selection import Law
from jaxacct.selection.mechanism import CANDIDATES
from jaxacct.training.ledger import Ledger
from jaxacct.training.plan import Plan
from jaxacct.tuning.best_candidate import best_of, several
from jaxacct.tuning.keys_and_ledger import Secret, note_whole
from jaxacct.tuning.matched_plan import MatchedPlan
from jaxacct.tuning.padding import fits, numbers_to_train
from jaxacct.tuning.private_score import PrivateScore, noise_for_score, scored, whole
from jaxacct.tuning.search_spaces import draws_alike
from jaxacct.tuning.side_by_side_training import side_by_side
from jaxacct.validation import COUNT, InputError, check, choice

__all__ = ["Tuned", "tune", "tune_with"]


@dataclass(frozen=True, eq=False)
class Tuned:
    """What a tuning releases, all of it covered by `epsilon`.

    Parameters
    ----------
    params : pytree
        Of the winner.
    config : dict
        The hyper-parameters of the winner.
    score : float
        By which it won; NaN with status "none".
    status : {"tuned", "none"}
        "none" where K was 0 or a candidate wins that raised an exception (all did, or all others are NaN): params are
        first parameters and config is a configuration that no data enter.
    epsilon : Bounds
        Of the whole at the plan's delta.
    mechanism : Mechanism
        The whole, as it is in the ledger.
    plan : Plan, optional
        By which the winner was trained; None of `tune_with`.
    candidates : {"iid", "iid, declared", "adaptive"}
        What the claim takes the candidates for: "iid" of the library's spaces, "iid, declared" where that is the user's
        word.

    >>> import jaxacct as ja
    >>> run = ja.Gaussian(2.0)
    >>> Tuned(0.0, {"rate": 0.1}, 0.9, "tuned", ja.epsilon(run, 1e-5), run).config
    {'rate': 0.1}
    """

    params: Any
    config: dict[str, Any]
    score: float
    status: str
    epsilon: Bounds = field(repr=False)
    mechanism: Mechanism = field(repr=False)
    plan: Plan | None = field(repr=False, default=None)
    candidates: str = "iid"


def tune(
    loss_fn: Callable[[Any, Any], Any],
    make_optimizer: Callable[[Mapping[str, Any]], Any],
    space: Any,
    data: Any,
    plan: Plan | MatchedPlan,
    *,
    init: Callable[[Any], Any],
    score: Callable[[Any], Any] | PrivateScore,
    candidates: str | None = None,
    pad: int | None = None,
    clip_norm: Any = 1.0,
    method: str = "auto",
    micro_batch: int | None = None,
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
        (params, example) -> scalar.
    make_optimizer : callable
        config -> Optax transformation.  Candidates with equal words (such as the optimizer's name) train side by side,
        16 at a time, with their numbers traced; "clip_norm" in a config is the clip norm.
    space : Space
        With ``sample(key) -> {name: value}``, such as `Random`, `Grid` or `grid`; independent of the data.
    data : pytree of arrays
        The plan's dataset_size examples along the first axis.
    plan : Plan or MatchedPlan
        With repetitions; a `MatchedPlan` where candidates are to differ in sampling probability and length too.
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
    pad : int, optional
        How long this takes reveals K, which no guarantee covers where the time can be observed.  With pad = n always n
        candidates are trained and scored, and those beyond K thrown away.  The law must be one with K <= n, such as
        ``truncated(law, n)``, for which the plan then accounts.  Only with pad is progress shown.
    clip_norm, method, micro_batch
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

    >>> import jax.numpy as jnp, optax
    >>> from jaxacct import selection, tuning
    >>> plan = Plan(target_delta=1e-5, dataset_size=100, sampling_probability=1.0, steps=2, noise_multiplier=2.5,
    ...     repetitions=selection.PointMass(2))  # with target_epsilon the noise is solved for
    >>> best = tune(lambda w, x: jnp.sum((w - x) ** 2), lambda c: optax.sgd(c["rate"]), tuning.grid(rate=[0.01, 0.1]),
    ...     np.ones((100, 2)), plan, init=lambda key: jnp.zeros(2), score=lambda w: -jnp.sum((w - 1.0) ** 2))
    >>> best.status, sorted(best.config), bool(best.epsilon.upper <= 4.0)
    ('tuned', ['rate'], True)
    """
    law = _law(plan, pad)
    planned = getattr(plan, "candidates", "iid")
    kind, word = _candidates(candidates or ("adaptive" if planned == "adaptive" else None), draws_alike(space))
    score = _with_noise(score, plan, kind)
    cost = whole(plan.mechanism, law, score, plan.target_delta, plan.relation, plan.epsilon, kind, planned)
    if plan.target_epsilon is not None and not cost.epsilon.upper <= plan.target_epsilon:
        raise InputError(_too_much(float(cost.epsilon.upper), plan.target_epsilon, kind != planned))
    if not isinstance(score, PrivateScore) and not callable(score):
        raise InputError("score must be a function of params on public data, or a tuning.PrivateScore")
    sizes = {np.shape(leaf)[:1] for leaf in jax.tree_util.tree_leaves(data)}
    if sizes != {(plan.dataset_size,)}:
        raise InputError(f"data has first axes {sorted(sizes)}, must be ({plan.dataset_size},); make the plan for them")
    secret = Secret(key)
    plans = plan.plans if isinstance(plan, MatchedPlan) else (plan,)
    note = f"tuning: a selection among runs of the plan; candidates {word}"
    note_whole(ledger, plans[0], cost.mechanism, note, plan.target_epsilon)
    shared = {"clip_norm": clip_norm, "method": method, "micro_batch": micro_batch}

    count, work = numbers_to_train(law, pad)
    configs = [dict(space.sample(secret.key(b"config", number))) for number in range(max(work, 1))]

    places = [secret.choice(b"setting", number, len(plans)) for number in range(len(configs))]

    def group(kind: tuple[int, tuple[tuple[str, str | None], ...]]) -> Callable[[Sequence[int]], list[Any]]:
        """Trains the candidates of one plan and choice of words."""
        place, words = kind
        optimizer = lambda numbers: make_optimizer({**numbers, **dict(words)})
        train = side_by_side(loss_fn, optimizer, plans[place], **shared)
        return several(lambda params, columns, keys: train(params, columns, keys, data), secret, init, configs)

    bar = Progress(work, progress if pad else False, unit="candidates")
    kinds = [(place, _words(config)) for place, config in zip(places, configs, strict=True)]
    found = best_of(kinds[:work], group, _value(score, secret), count, bar)
    if found is None:
        first = jax.device_get(init(secret.key(b"init", 0)))
        return Tuned(first, configs[0], math.nan, "none", cost.epsilon, cost.mechanism, plans[places[0]], word)
    number, params, won = found
    return Tuned(params, configs[number], won, "tuned", cost.epsilon, cost.mechanism, plans[places[number]], word)


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
    space, pad, key, progress
        As for `tune`.
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
    kind, word = _candidates(candidates, False)
    cost = whole(mechanism, repetitions, None, target_delta, relation, candidates=kind)
    secret = Secret(key)
    if ledger is not None:
        ledger.spend(cost.mechanism, f"tuning: a selection among runs of one mechanism; candidates {word}")
    count, work = numbers_to_train(repetitions, pad)
    configs = [dict(space.sample(secret.key(b"config", number))) for number in range(max(work, 1))]

    def one_by_one(numbers: Sequence[int]) -> list[Any]:
        return [train(dict(configs[number]), secret.key(b"train", number)) for number in numbers]

    bar = Progress(work, progress if pad else False, unit="candidates")
    found = best_of([None] * work, lambda _: one_by_one, lambda x, _: float(score(x)), count, bar, together=1)
    if found is None:
        return Tuned(None, configs[0], math.nan, "none", cost.epsilon, cost.mechanism, None, word)
    return Tuned(found[1], configs[found[0]], found[2], "tuned", cost.epsilon, cost.mechanism, None, word)


def _law(plan: Plan | MatchedPlan, pad: int | None) -> Law:
    law = plan.repetitions
    if not isinstance(law, Law):
        raise InputError("plan has no repetitions; make it with repetitions=law, so that its noise covers all K runs")
    if pad is not None:
        fits(law, int(check("pad", pad, COUNT)))
    return law


def _candidates(declared: str | None, known: bool) -> tuple[str, str]:
    """("iid" or "adaptive", the same with "declared" where it is the user's word).

    known : whether the space is i.i.d. by construction.
    """
    if declared is None:
        return ("iid", "iid") if known else ("adaptive", "adaptive")
    kind = choice("candidates", declared, CANDIDATES)
    return kind, "iid, declared" if kind == "iid" and not known else kind


def _too_much(cost: float, target: float, unplanned: bool) -> str:
    """The error line: what the whole costs, and what would help."""
    if unplanned:
        return (
            f"candidates = 'adaptive' cost epsilon {cost:.6g} with this plan, above the plan's target {target:.6g}; "
            "make the plan with candidates='adaptive', or declare candidates='iid' if all draws of the space are "
            "independent and from one law"
        )
    return (
        f"the whole with its private score costs epsilon {cost:.6g}, above the plan's target "
        f"{target:.6g}; make the plan for a lower target, or give the score more noise"
    )


def _words(config: Mapping[str, Any]) -> tuple[tuple[str, str | None], ...]:
    """The words and Nones of a configuration, which candidates that are trained side by side have in common."""
    return tuple((name, x) for name, x in config.items() if x is None or isinstance(x, str))


def _with_noise(score: Any, plan: Plan | MatchedPlan, kind: str) -> Any:
    """The score; a private one with its noise found where it was left out."""
    if not isinstance(score, PrivateScore) or score.noise_multiplier is not None:
        return score
    if plan.target_epsilon is None:
        raise InputError("noise_multiplier of the score is missing; give it, or make the plan with a target_epsilon")
    found = noise_for_score(plan.repetitions, plan.target_epsilon, plan.target_delta, plan.relation, kind)
    return replace(score, noise_multiplier=found)


def _value(score: Any, secret: Secret) -> Callable[[Any, int], float]:
    """(params, number) -> the score of a candidate."""
    if not isinstance(score, PrivateScore):
        return lambda params, _: float(score(params))
    held = jax.tree.map(jax.numpy.asarray, score.data)
    noisy = jax.jit(lambda params, key: scored(score.value, params, held, key, score.noise_multiplier, score.unit))
    return lambda params, number: float(noisy(params, secret.key(b"score", number)))
