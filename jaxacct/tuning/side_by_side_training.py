"""Many candidates of one plan trained side by side: the trainer's step under vmap, each with a key of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.core.chacha import CHACHA20, host_fold_in, key_from_bytes
from jaxacct.core.types import PyTree
from jaxacct.core.validation import COUNT, InputError, check, choice
from jaxacct.training.clipping.clipped_sum import CLIP_NORM, METHODS, sensitivity
from jaxacct.training.clipping.examples_apart import refuse_closed_over
from jaxacct.training.plan import Plan
from jaxacct.training.step import noise
from jaxacct.training.step.counts_and_losses import AdaptiveClip, PrivateLoss
from jaxacct.training.step.models import Untrained, join_model, split_model
from jaxacct.training.step.step_function import Carried, Numbers, StepRule, draws, numbers, private_step
from jaxacct.training.step.step_mechanisms import BY_PASS, OF_ONE_SIZE

STEP_STREAM = 5
"""Purpose of the stream of keys that has one key for every step; `jaxacct.training.noise` has the purposes 1 to 4."""
PASS_STREAM = 6
"""Purpose of the stream that has one key for every pass over fixed batches, and for every round of allocation."""
STEPS_PER_CALL = 128
"""Steps in one call of the compiled program: between two calls training can be interrupted."""
MOST_EXAMPLES_AT_ONCE = 96
"""Default of the most examples in a micro-batch of each candidate: it bounds the memory."""


def side_by_side(
    loss_fn: Callable[..., Any],
    make_optimizer: Callable[[Mapping[str, Any]], Any],
    plan: Plan,
    *,
    clip_norm: PyTree = 1.0,
    method: str = "auto",
    micro_batch: int | None = None,
    rngs: bool = False,
    trainable: PyTree = None,
    private_loss: PrivateLoss | None = None,
) -> Callable[[Any, Mapping[str, Any], Any, Any], Any]:
    """A function (params, configs, keys, data) -> params that trains n candidates of one plan at once.

    Each candidate is the trainer's DP-SGD over all steps of the plan, with batches and noise from its own key: by
    itself it costs ``plan.mechanism``.  What may differ between candidates are numbers that change neither shapes nor
    privacy: whatever ``make_optimizer`` reads, and the clip norm.

    Nothing here makes a selection private: the parameters of all candidates are n releases.  `tune` keeps one.

    Parameters
    ----------
    loss_fn : (params, example) -> scalar loss of one example; with rngs (params, example, key).
    make_optimizer : config -> Optax transformation.  Under vmap the values of a config are traced numbers.
    plan : of each candidate.
    clip_norm : > 0, a pytree of norms, or an AdaptiveClip; used where a config has no "clip_norm" of its own.
    method, rngs, private_loss : as for the Trainer.
    micro_batch : examples of each candidate at a time, by default at most 96.
    trainable : what is trained, as for the Trainer; all else is frozen, and comes back as it was.

    Returns
    -------
    callable
        Of params, a pytree whose leaves have the n candidates along the first axis; configs, {name: (n,) numbers};
        keys, uint32 (n, 8) from `key_words`, each for one candidate and never used again; and data, the plan's
        dataset_size examples along the first axis.  It returns the trained parameters, shaped like params.  A candidate
        that is ruined (NaN) leaves the others as they are.  The function is compiled once for each n.

    References
    ----------
    README.md of this folder, "Candidates side by side".

    >>> import optax, secrets
    >>> plan = Plan(target_epsilon=2.0, target_delta=1e-5, dataset_size=50, sampling_probability=1.0, steps=3)
    >>> train = side_by_side(lambda w, x: jnp.sum((w - x) ** 2), lambda c: optax.sgd(c["rate"]), plan)
    >>> keys = key_words([secrets.token_bytes(32) for _ in range(4)])
    >>> done = train(jnp.zeros((4, 2)), {"rate": np.array([0.0, 0.1, 0.2, np.nan])}, keys, jnp.ones((50, 2)))
    >>> done.shape, bool(jnp.all(done[0] == 0.0)), np.isfinite(done).all(axis=1).tolist()
    ((4, 2), True, [True, True, True, False])
    """
    choice("method", method, METHODS)
    adaptive = clip_norm if isinstance(clip_norm, AdaptiveClip) else None
    first_clip = adaptive.initial if adaptive else clip_norm
    sensitivity(first_clip)  # refuses anything that is not a clip norm
    if plan.unit != "record":
        raise InputError(f"unit = {plan.unit!r} is not supported side by side; train each candidate by a Trainer")
    size = _room(plan) if micro_batch is None else int(check("micro_batch", micro_batch, COUNT))
    schedule = _schedule(plan, adaptive, private_loss)

    def one(
        start: Any,
        stop: Any,
        carried: Carried,
        config: Mapping[str, Any],
        words: Any,
        data: Any,
        rest: Untrained | None,
        drawn: tuple[Any, Any],
    ) -> Carried:
        """Steps start to stop - 1 of one candidate; ``drawn`` holds the noise on their counts and losses."""
        rule = StepRule(loss_fn, make_optimizer(config), plan.sampling, size, method, adaptive, plan.cap)
        step = private_step(replace(rule, rngs=bool(rngs), private_loss=private_loss))
        root = jax.random.wrap_key_data(words, impl=CHACHA20)

        def body(t: Any, carried: Carried) -> Carried:
            now, begins = jax.tree.map(lambda a: jnp.asarray(a)[t], schedule)
            count, loss = jax.tree.map(lambda a: a[t - start], drawn)
            now = now._replace(count_draw=count, loss_draw=loss)
            key, pass_key = noise.stream(root, STEP_STREAM, t), noise.stream(root, PASS_STREAM, begins)
            after, _ = step(carried, jax.random.key_data(key), jax.random.key_data(pass_key), data, now, rest)
            return jax.tree.map(lambda new, old: new.astype(old.dtype), after, carried)

        return jax.lax.fori_loop(start, stop, body, carried)

    @jax.jit
    def begin(params: Any, config: Mapping[str, Any]) -> Carried:
        def of_one(params: Any, config: Mapping[str, Any]) -> Carried:
            clip = config.get("clip_norm", first_clip)
            state = make_optimizer(config).init(params)
            # a state that is made of numbers of the config must be one array like all others
            state = jax.tree.map(jnp.asarray, state)
            return Carried(params, state, jax.tree.map(lambda c: jnp.asarray(c, jnp.float32), clip), jnp.int32(0))

        return jax.vmap(of_one)(params, config)

    steps = jax.jit(jax.vmap(one, (None, None, 0, 0, 0, None, 0, 0)))

    def drawn(roots: np.ndarray, start: int, stop: int) -> tuple[Any, Any]:
        """The noise on counts and on losses of some steps of all candidates; None for one that is not released."""
        found: list[Any] = []
        for root in roots:
            keys = host_fold_in(host_fold_in(root, STEP_STREAM), np.arange(start, stop)).T
            rows = [draws(plan.at(start + i), adaptive, private_loss, words) for i, words in enumerate(keys)]
            found.append(rows + rows[-1:] * (STEPS_PER_CALL - len(rows)))  # one shape for every call
        count, loss = (
            None if one is None else np.array([[both[i] for both in rows] for rows in found], np.int32)
            for i, one in enumerate((adaptive, private_loss))
        )
        return count, loss

    def train(params: Any, configs: Mapping[str, Any], keys: Any, data: Any) -> Any:
        count = _check(plan, params, configs, keys, data)
        data = jax.tree.map(jnp.asarray, data)
        configs = {name: jnp.asarray(np.asarray(value), jnp.float32) for name, value in configs.items()}
        params = jax.tree.map(jnp.asarray, params)
        trained, rest = (params, None) if trainable is None else split_model(params, trainable)
        carried = begin(trained, configs)
        words = np.asarray(keys, np.uint32).reshape(count, 8)
        for start in range(0, plan.steps, STEPS_PER_CALL):
            stop = min(start + STEPS_PER_CALL, plan.steps)
            given = (start, stop, carried, configs, words, data, rest, drawn(words, start, stop))
            if start == 0:
                refuse_closed_over("loss_fn", steps.trace(*given).jaxpr, data, () if rest is None else rest.frozen)
            carried = steps(*given)
            jax.block_until_ready(carried.params)
        return join_model(carried.params, rest)

    return train


def key_words(roots: Sequence[bytes]) -> np.ndarray:
    """The keys of several candidates, from 32 secret bytes each.

    Parameters
    ----------
    roots : 32 secret bytes for each candidate, used for nothing else.

    Returns
    -------
    numpy.ndarray of uint32, shape (n, 8)

    >>> key_words([bytes(32), bytes(range(32))]).shape
    (2, 8)
    """
    return np.array([jax.random.key_data(key_from_bytes(root)) for root in roots], np.uint32).reshape(-1, 8)


def _room(plan: Plan) -> int:
    """Examples of a micro-batch: equal parts of about the most that any candidate draws, on which all others wait."""
    largest = max(plan.segments, key=lambda segment: segment.expected_batch_size)
    expected, q = largest.expected_batch_size, largest.sampling_probability
    spread = 0.0 if plan.sampling in OF_ONE_SIZE else 3.0 * np.sqrt(expected * (1.0 - q))
    most = plan.cap or np.ceil(expected + spread)
    return max(int(np.ceil(most / np.ceil(most / MOST_EXAMPLES_AT_ONCE))), 1)


def _schedule(
    plan: Plan, adaptive: AdaptiveClip | None, private_loss: PrivateLoss | None
) -> tuple[Numbers, np.ndarray]:
    """The numbers of every step along the first axis, and the first step of its pass or round, where there are any."""
    begins, rows = np.zeros(plan.steps, np.int32), []
    if plan.sampling in BY_PASS:
        for first, last in plan.passes:
            begins[first:last] = first
    for segment in plan.segments:
        each = numbers(segment, plan.sampling, adaptive, 0, private_loss)
        rows.append(jax.tree.map(lambda a, n=segment.steps: np.repeat(np.asarray(a)[None], n, axis=0), each))
    table = jax.tree.map(lambda *parts: np.concatenate(parts), *rows)
    place = np.arange(plan.steps, dtype=np.int32) - begins if plan.sampling in BY_PASS else np.zeros_like(begins)
    return table._replace(position=place), begins


def _check(plan: Plan, params: Any, configs: Mapping[str, Any], keys: Any, data: Any) -> int:
    """The number of candidates; InputError where something does not fit the others or the plan."""
    sizes = {np.shape(leaf)[:1] for leaf in jax.tree_util.tree_leaves(data)}
    if sizes != {(plan.dataset_size,)}:
        raise InputError(
            f"data has first axes {sorted(sizes)}, must be ({plan.dataset_size},), the plan's dataset_size; "
            "make the plan for these data"
        )
    count = int(np.shape(keys)[0])
    for name, value in [*configs.items(), *(("params", leaf) for leaf in jax.tree_util.tree_leaves(params))]:
        if np.shape(value)[:1] != (count,):
            raise InputError(f"{name} has shape {np.shape(value)}, must begin with {count}, the number of keys")
    if "clip_norm" in configs:
        check("clip_norm", configs["clip_norm"], CLIP_NORM)
    return count
