"""`tune_in_rounds`: selections that follow each other, each round's winner public and the next space made from it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jaxacct.core.validation import COUNT, InputError, check_one
from jaxacct.training.ledger import Ledger
from jaxacct.training.plan import Plan
from jaxacct.training.step.private_loss import PrivateLoss
from jaxacct.tuning.candidate_runs import Runs, Winner
from jaxacct.tuning.keys_and_ledger import Secret, note_whole
from jaxacct.tuning.private_score import PrivateScore
from jaxacct.tuning.search_plan import SearchPlan
from jaxacct.tuning.tuned import Prepared, Tuned, law_of, taken_for, value_of

__all__ = ["tune_in_rounds"]


def tune_in_rounds(
    loss_fn: Callable[..., Any],
    make_optimizer: Callable[[Mapping[str, Any]], Any],
    space: Any,
    data: Any,
    plan: SearchPlan | Plan,
    *,
    update: Callable[[tuple[Winner, ...]], Any],
    init: Callable[[Any], Any],
    score: Callable[[Any], Any] | PrivateScore,
    rounds: int | None = None,
    candidates: str | None = None,
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
    """Tune in rounds, as Bayesian optimisation in batches: each round's winner is public and shapes the next space.

    In every round K_r candidates, K_r fresh and secret, are drawn from the round's space, trained, and the best is
    released.  `update` makes the next space from all winners so far.  The whole is the composition of the rounds, far
    cheaper than candidates each of which may see all before it.  One entry for all rounds is on the disk before the
    first candidate is trained, so that stopping early claims no less.

    Parameters
    ----------
    loss_fn, make_optimizer, data, init, pad, clip_norm, method, micro_batch, rngs, trainable, private_loss
        As for `tune`.
    key, progress
        As for `tune`.
    space : Space
        Of the first round.
    plan : SearchPlan or Plan
        A `SearchPlan` with `rounds`, which solves for the noise; a Plan with repetitions and a noise multiplier.
    update : callable
        (winners so far, in order) -> the space of the next round, or None to stop.  It must use nothing else that
        depends on the data.  A round that releases nothing adds no winner.
    score : callable or PrivateScore
        As for `tune`; a PrivateScore needs its noise multiplier.
    rounds : int, optional
        How many; by default what the plan is for.
    candidates : {"iid", "adaptive"}, optional
        As for `tune`, of every round's space.
    ledger : path or Ledger, optional
        What it holds already counts against the plan's target.

    Returns
    -------
    Tuned
        The winner with the best score; all of them in `Tuned.winners`.

    Raises
    ------
    InputError
        A plan whose target the rounds exceed, before anything is spent; a space that is not i.i.d. where that is
        accounted for; and as `tune`.

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
    if not callable(update):
        raise InputError(f"update = {update!r:.40} must be a function of the winners that gives the next space")
    law = law_of(plan, space, pad)
    count = getattr(plan, "rounds", 1) if rounds is None else rounds
    count, top = int(check_one("rounds", count, COUNT, "one number for all")), int(getattr(plan, "top", 1))
    prepared = Prepared.of(plan, law, space, candidates, score, data, top, count)
    if candidates == "iid":  # it is declared of spaces that are not known yet
        prepared = replace(prepared, word="iid, declared")
    secret = Secret(key)
    note = f"tuning: {count} rounds of a selection among runs of the plan; candidates {prepared.word}"
    note_whole(ledger, prepared.plans[0], prepared.cost.mechanism, note, plan.target_epsilon)
    shared = {"clip_norm": clip_norm, "method": method, "micro_batch": micro_batch}
    shared |= {"rngs": rngs, "trainable": trainable, "private_loss": private_loss}
    value = functools.partial(value_of, prepared.score)
    runs = Runs(loss_fn, make_optimizer, data, prepared.plans, init, value, shared)
    winners: list[Winner] = []
    nothing: list[Winner] = []
    for number in range(count):
        one = Secret(secret.root(b"round", number))
        found, none = runs.best(space, law, pad, top, one, progress)
        winners.extend(found)
        nothing.append(none)
        if number + 1 < count:
            space = update(tuple(winners))
            if space is None:
                break
            _require_the_same(space, candidates, prepared.word, number + 2)
    return prepared.released(winners, nothing[0])


def _require_the_same(space: Any, candidates: str | None, word: str, number: int) -> None:
    """InputError where the candidates of a later round are not what is accounted for."""
    if word != "adaptive" and taken_for(candidates, space)[0] != "iid":
        raise InputError(
            f"the space of round {number} may keep state and its candidates count as adaptive, while the plan counts "
            "i.i.d. ones; give a Grid or a Random, or a SearchPlan with candidates='adaptive'"
        )
