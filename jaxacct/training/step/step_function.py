"""One private step as pure functions: `private_step`, and its parts `draw`, `add` per micro-batch, and `release`."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxacct.core.chacha import CHACHA20, host_split
from jaxacct.core.files import optional_package
from jaxacct.core.types import Foreign, Leaf
from jaxacct.core.validation import OPEN_PROBABILITY, InputError, check_one
from jaxacct.mechanisms.dp_sgd_run import nearest_slots
from jaxacct.strategies.strategy import Taps
from jaxacct.training.clipping.clipped_sum import Clipped, beside, clipped_sum, deviation, grouped, split_loss, wide
from jaxacct.training.clipping.examples_apart import one_of
from jaxacct.training.clipping.traces import trace
from jaxacct.training.sampling import sampler
from jaxacct.training.sampling.sampler import of_users
from jaxacct.training.step import noise
from jaxacct.training.step import step_mechanisms as rules
from jaxacct.training.step.counts_and_losses import AdaptiveClip, PrivateLoss, gradient_noise
from jaxacct.training.step.models import Untrained, join_model, paths


class Carried(NamedTuple):  # digests of states contain this name, so saved runs depend on it
    """State that a step hands to the next step."""

    params: Any
    opt_state: Any
    clip_norm: Any
    not_finite: Any


class Correlated(NamedTuple):
    """Optimizer state of a step with correlated noise.  Keep the buffers `past` as secret as the run's key."""

    past: Any  # a pytree like the parameters, whose arrays have a first axis that counts the buffers
    own: Any


def own_state(opt_state: Any) -> Any:
    return opt_state.own if isinstance(opt_state, Correlated) else opt_state


class Numbers(NamedTuple):
    """Arguments of a compiled step that may differ between steps.  The plan and the step's key determine them."""

    threshold: Any  # from `sampler.threshold`, of shape (3,) if all records have one rate, else (3, records)
    size: Any  # by batch rule, the number of records in a fixed-size batch, of slots in a round, or of groups in a run
    position: Any  # which batch of its pass, slot of its round, or group of the run the step takes; counted from 0
    expected_batch_size: Any
    gradient_noise: Any  # noise multiplier on the gradients
    count_draw: Any = None  # noise on the adaptive clip norm's count; None if the clip norm is fixed
    loss_draw: Any = None  # noise on the private loss; None if a step releases no loss
    taps: Any = None  # the strategy's `Taps` for correlated noise; None if the noise of all steps is independent


def _toward_zero(weights: Any) -> Any:
    """Round weights to float32 toward zero.  A decay rounded up would raise the sensitivity of the matrix C."""
    exact, near = np.asarray(weights, np.float64), np.asarray(weights, np.float32)
    return np.where(np.abs(near) > np.abs(exact), np.nextafter(near, np.float32(0.0)), near)


def numbers_at(
    plan: Any, step: int, adaptive: AdaptiveClip | None, private_loss: PrivateLoss | None = None, words: Any = None
) -> Numbers:
    """Return the `Numbers` of a plan's step, with the noise that the host draws from the step's key."""
    segment, sampling, taps = plan.at(step), plan.sampling, plan.taps(step)
    expected, threshold = segment.expected_batch_size, sampler.threshold(segment.sampling_probability)
    place = step - plan.pass_of(step)[1] if sampling in rules.BY_PASS else 0
    size: Any
    if sampling == rules.ORDER:
        place %= plan.batches
        if taps is None:
            raise InputError("taps are missing; in a fixed order the noise is relative to those of a strategy")
    if sampling == rules.ALLOCATION:
        size = nearest_slots(segment.sampling_probability)
    elif sampling == rules.CYCLIC:
        size = plan.groups
    else:
        # UNSAMPLED rules use a record once a pass: rounding up costs no privacy.  1e-12 covers rounding of `expected`.
        size = np.ceil(expected) if sampling in rules.UNSAMPLED else np.floor(expected * (1.0 + 1e-12))
    if plan.rates_digest is not None:
        plan.require_rates()  # refuses a plan without rates, even if `_thresholds` has cached an equal plan with rates
        threshold = _thresholds(plan)
    return Numbers(
        threshold,
        np.int32(size),
        np.int32(place),
        np.float32(expected),
        np.float32(gradient_noise(segment.noise_multiplier, expected, adaptive, private_loss)),
        *draws(segment, adaptive, private_loss, words),
        None if taps is None else jax.tree.map(_toward_zero, taps),
    )


@functools.lru_cache(maxsize=1)
def _thresholds(plan: Any) -> np.ndarray:
    """Return the `sampler.threshold` of every record of a plan, as an array of shape (3, dataset_size)."""
    found = sampler.threshold(plan.require_rates())
    found.setflags(write=False)
    return found


def draws(segment: Any, adaptive: AdaptiveClip | None, private_loss: PrivateLoss | None, words: Any) -> tuple[Any, Any]:
    """Return (noise for a step's count of unclipped members, noise for its private loss), each None if not released."""
    expected = segment.expected_batch_size
    own = lambda release: None if release is None or words is None else release.draw(words, expected)
    return own(adaptive), own(private_loss)


@dataclass(frozen=True)
class StepRule:
    """Settings that all steps of a program share.  `Trainer` describes them."""

    loss_fn: Callable[..., Any]
    optimizer: Any
    sampling: str
    micro_batch: int
    method: str
    adaptive: AdaptiveClip | None
    cap: int | None = None
    examples_per_user: int | None = None
    rngs: bool = False
    has_aux: bool = False
    private_loss: PrivateLoss | None = None
    buffers: int = 0  # the number of buffers of the correlated noise; 0 for independent noise
    filled_up: bool = False  # whether the data are (rows, mask), with a mask that is False in rows that are no records

    def begin(self, params: Any) -> Any:
        """Return the optimizer's state before the first step, with zero buffers if the noise is correlated."""
        own = self.optimizer.init(params)
        if not self.buffers:
            return own
        return Correlated(self.no_past(params), own)

    def no_past(self, params: Any) -> Any:
        """Return the buffers of correlated noise before the first step."""
        dtype = _dtype_of_sums(params)
        return jax.tree.map(lambda p: jnp.zeros((self.buffers, *jnp.shape(p)), dtype), params)

    def member_loss(self, frozen: Untrained | None) -> Callable[[Any, tuple[Any, ...]], Any]:
        """Return (trained, member) -> (loss, Seen).  A member (an example or user) is (data,) or (data, key)."""
        arrays = lambda *given: jax.tree.map(jnp.asarray, self.loss_fn(*given))
        single = lambda *given: split_loss(arrays(*given), self.has_aux)
        each = single if self.examples_per_user is None else mean_over_examples(single)

        def loss(trained: Any, member: tuple[Any, ...]) -> tuple[Any, Seen]:
            value, aux = each(join_model(trained, frozen), *member)
            bounded = jnp.int32(0) if self.private_loss is None else self.private_loss.units(value)
            return value, Seen(value.astype(wide(value.dtype)), bounded, aux)

        return loss


class Sums(NamedTuple):
    """Sums over the members added so far: their clipped gradients, their number, and their losses and aux (`Seen`)."""

    clipped: Clipped
    members: Any
    seen: Seen


class Observed(NamedTuple):
    """Values of a step's batch, for a log.  Only `value` is private.  No decision may depend on the other fields."""

    loss: Any  # like `aux`, summed over the contributing members, whose number is `members - not_finite`
    aux: Any
    members: Any
    clipped: Any  # number of members whose gradient was clipped
    not_finite: Any  # number of members whose gradient is not finite and contributes nothing
    value: Any  # the private loss that the optimizer got; None if no private loss is released


def keys(words: Any, pass_words: Any) -> tuple[Any, Any]:
    """Return (key of a step, key of the step's pass), given the uint32 words of both keys."""
    key, pass_key = (jax.random.wrap_key_data(w, impl=CHACHA20) for w in (words, pass_words))
    return key, pass_key


def draw(rule: StepRule, key: Any, pass_key: Any, size: int, now: Numbers) -> sampler.Selection:
    """Return which of the `size` records (or users) take part in the step."""
    key, pass_key = noise.stream(key, noise.SAMPLING), noise.stream(pass_key, noise.SAMPLING)
    if rule.sampling == rules.POISSON:
        return sampler.poisson(key, size, now.threshold)
    if rule.sampling == rules.TRUNCATED:
        assert rule.cap is not None
        return sampler.truncated_poisson(key, size, now.threshold, min(rule.cap, size))
    if rule.sampling == rules.ALLOCATION:
        return sampler.random_allocation(pass_key, size, now.size, now.position)
    if rule.sampling == rules.CYCLIC:
        return sampler.cyclic_poisson(key, pass_key, size, now.threshold, now.size, now.position)
    if rule.sampling in rules.UNSAMPLED:
        return sampler.fixed_batches(pass_key, size, now.size, now.position)
    if rule.sampling == rules.WITHOUT_REPLACEMENT:
        return sampler.without_replacement(key, size, now.size)
    raise InputError(f"sampling = {rule.sampling!r:.40} has no sampler; use one of {', '.join(rules.SAMPLING)}")


def draw_on_host(rule: StepRule, words: Any, pass_words: Any, size: int, now: Numbers) -> np.ndarray:
    """Return the indices that `draw` selects, in the same order, computed in NumPy from the words of both keys."""
    key, pass_key = (noise.host_stream(each, noise.SAMPLING) for each in (words, pass_words))
    if rule.sampling == rules.POISSON:
        return sampler.host_poisson(key, size, now.threshold)
    if rule.sampling == rules.TRUNCATED:
        draw_key, order_key = host_split(key)
        order, taken = sampler.host_permutation(order_key, size), np.zeros(size, bool)
        taken[sampler.host_poisson(draw_key, size, now.threshold)] = True
        return order[taken[order]][: rule.cap]
    if rule.sampling == rules.ALLOCATION:
        return np.flatnonzero(sampler.host_slots(pass_key, size, int(now.size)) == int(now.position))
    if rule.sampling == rules.CYCLIC:
        turn = sampler.host_slots(pass_key, size, int(now.size)) == int(now.position)
        drawn = sampler.host_poisson(key, size, now.threshold)
        return drawn[turn[drawn]]
    if rule.sampling in rules.UNSAMPLED:
        begin = int(now.size) * int(now.position)
        return sampler.host_permutation(pass_key, size)[begin : begin + int(now.size)]
    if rule.sampling == rules.WITHOUT_REPLACEMENT:
        return sampler.host_permutation(key, size)[: int(now.size)]
    raise InputError(f"sampling = {rule.sampling!r:.40} has no sampler; use one of {', '.join(rules.SAMPLING)}")


def no_sums(rule: StepRule, carried: Carried, batch: Any, frozen: Untrained | None = None) -> Sums:
    """Return the `Sums` before any member is added.  Only the shapes and dtypes of `batch` (see `add`) are used."""
    params = carried.params
    dtype = _dtype_of_sums(params)
    nothing = Clipped(jax.tree.map(lambda p: jnp.zeros(p.shape, dtype), params), jnp.int32(0), jnp.int32(0))
    key = (jax.eval_shape(lambda: jax.random.key(0, impl=CHACHA20)),) if rule.rngs else ()
    seen: Seen = jax.eval_shape(rule.member_loss(frozen), params, (one_of(batch), *key))[1]
    return Sums(nothing, jnp.int32(0), jax.tree.map(lambda a: jnp.zeros(a.shape, beside(a.dtype)), seen))


def _dtype_of_sums(params: Any) -> Any:
    return wide(jnp.result_type(*jax.tree_util.tree_leaves(params)))


def add(
    rule: StepRule,
    carried: Carried,
    key: Any,
    so_far: Sums,
    batch: Any,
    indices: Any,
    mask: Any,
    frozen: Untrained | None = None,
) -> Sums:
    """Add a micro-batch to the sums.  Row i of `batch` is member `indices[i]`; it counts only if `mask[i]` is True."""
    members: tuple[Any, ...] = (batch,)
    if rule.rngs:  # a member's key depends on its number in the data, so every device computes the same key
        members += (jax.vmap(jax.random.fold_in, (None, 0))(noise.stream(key, noise.MODEL), indices),)
    loss = rule.member_loss(frozen)
    summed, seen = clipped_sum(loss, carried.params, members, mask, carried.clip_norm, rule.method, has_aux=True)
    return jax.tree.map(jnp.add, so_far, Sums(summed, jnp.sum(mask, dtype=jnp.int32), seen))


def release(
    rule: StepRule,
    carried: Carried,
    key: Any,
    sums: Sums,
    now: Numbers,
    add_noise: Callable[[Any, Any, Any], Any] | None = None,
) -> tuple[Carried, Observed]:
    """Make a noisy mean of a batch's sums, and update the parameters with it.  Each step must have a key of its own."""
    optax = optional_package("optax", "training")
    params, opt_state, clip_norm, not_finite = carried
    summed, members, seen = sums
    found, groups = grouped(clip_norm, params)
    norms = [found[group] for group in sorted(set(groups))]  # parts without trained parameters are left out
    std = deviation(now.gradient_noise, norms)
    with_noise = lambda tree: (add_noise or noise.add)(noise.stream(key, noise.NOISE), tree, std)
    if now.taps is None:
        noisy = with_noise(summed.total)
    else:
        past, opt_state = opt_state
        fresh = with_noise(jax.tree.map(jnp.zeros_like, summed.total))
        own, past = filtered(now.taps, fresh, past)
        noisy = jax.tree.map(jnp.add, summed.total, own)
    mean = jax.tree.map(lambda g, p: (g / now.expected_batch_size).astype(p.dtype), noisy, params)
    value = None
    if rule.private_loss is not None:
        value = rule.private_loss.release(seen.bounded, members, now.loss_draw, now.expected_batch_size)
    updates, opt_state = updated(rule.optimizer, mean, opt_state, params, value)
    if rule.adaptive is not None:
        clip_norm = rule.adaptive.update(
            clip_norm, members - summed.clipped - summed.not_finite, members, now.count_draw, now.expected_batch_size
        )
    if now.taps is not None:
        opt_state = Correlated(past, opt_state)
    after = Carried(optax.apply_updates(params, updates), opt_state, clip_norm, not_finite + summed.not_finite)
    return after, Observed(seen.loss, seen.aux, members, summed.clipped, summed.not_finite, value)


def filtered(taps: Taps, fresh: Any, past: Any) -> tuple[Any, Any]:
    """Return a step's correlated noise and the next step's buffers, given independent noise and this step's buffers."""

    def one(z: Any, buffers: Any) -> tuple[Any, Any]:
        own, past, keep, of_sum, of_fresh = (jnp.asarray(each, z.dtype) for each in taps)
        wide = lambda weights: weights.reshape(-1, *(1,) * z.ndim)
        noise = own * z + jnp.tensordot(past, buffers, 1, precision=jax.lax.Precision.HIGHEST)
        return noise, wide(keep) * buffers + wide(of_sum) * noise + wide(of_fresh) * z

    leaves, structure = jax.tree_util.tree_flatten(fresh)
    pairs = list(map(one, leaves, jax.tree_util.tree_leaves(past)))
    together = lambda place: jax.tree_util.tree_unflatten(structure, [pair[place] for pair in pairs])
    return together(0), together(1)


def sums_over(
    rule: StepRule,
    carried: Carried,
    key: Any,
    drawn: sampler.Selection,
    data: Any,
    frozen: Untrained | None = None,
    first: Any = None,
) -> Sums:
    """Return the sums over the drawn members.  If `data` has only some members, `first` is how many precede them."""
    most = rule.examples_per_user

    def rows(places: Any) -> tuple[Any, Any]:
        if most is None:
            found = jax.tree.map(lambda a: a[places], data)
            return found if rule.filled_up else (found, True)
        return of_users(noise.stream(key, noise.EXAMPLES), data, places, most, first)

    def one(so_far: Sums, places: Any, mask: Any) -> Sums:
        # `there` is False for users without examples and for rows that fill up, so that they add nothing to any sum
        batch, there = rows(places)
        indices = places if first is None else places + first
        return add(rule, carried, key, so_far, batch, indices, mask & there, frozen)

    micro = min(rule.micro_batch, drawn.indices.shape[0])
    everyone = rule.sampling == rules.TRUNCATED and first is None
    nothing = no_sums(rule, carried, jax.eval_shape(lambda: rows(drawn.indices[:micro])[0]), frozen)
    return sampler.over_micro_batches(drawn, micro, one, nothing, all_places=everyone)


def private_step(rule: StepRule) -> Callable[..., tuple[Carried, Observed]]:
    """Return the step as a pure function, which gets the words of a step key and of a pass key.

    Each step needs its own step key.  A pass or round has one pass key; with groups or a fixed order, a run has one.
    """

    def step(
        carried: Carried, words: Any, pass_words: Any, data: Any, now: Numbers, frozen: Untrained | None = None
    ) -> tuple[Carried, Observed]:
        key, pass_key = keys(words, pass_words)
        size = (data.count if rule.examples_per_user else jax.tree_util.tree_leaves(data)[0]).shape[0]
        drawn = draw(rule, key, pass_key, size, now)
        return release(rule, carried, key, sums_over(rule, carried, key, drawn, data, frozen), now)

    return step


class Seen(NamedTuple):
    """Loss and aux of one member, or their sums over all members that contribute.  Both are *not* private."""

    loss: Any
    bounded: Any  # the clipped loss in units of bound/1024 (`PrivateLoss`); 0 if no private loss is released
    aux: Any  # what the loss function returns besides the loss, or an empty tuple


def mean_over_examples(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return (params, (examples, weights)[, key]) -> weighted mean of loss_fn over the examples of one user."""

    def loss(params: Any, user: tuple[Any, Any], *key: Any) -> Any:
        examples, weights = user
        places = jnp.arange(weights.shape[0])
        own = [jax.vmap(jax.random.fold_in, (None, 0))(each, places) for each in key]
        found = jax.vmap(loss_fn, (None, 0, *(0 for _ in own)))(params, examples, *own)

        def mean(each: Any) -> Any:
            inexact = jnp.issubdtype(each.dtype, jnp.inexact)
            dtype = each.dtype if inexact else jnp.result_type(each, jnp.float32)
            return jnp.sum(each * weights.astype(dtype).reshape(-1, *(1,) * (each.ndim - 1)), axis=0)

        return jax.tree.map(mean, found)

    return loss


def require_optimizer(optimizer: Any) -> None:
    """Raise InputError if the optimizer is not an Optax transformation."""
    if isinstance(optimizer, type) or not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        raise InputError(
            f"optimizer = {optimizer!r:.60} must be an Optax transformation; use optax.adam(1e-3), for example"
        )


def updated(optimizer: Any, mean: Any, opt_state: Any, params: Any, value: Any = None) -> tuple[Any, Any]:
    """Return the optimizer's updates and new state, given a noisy mean gradient and, if released, the private loss."""
    optax = optional_package("optax", "training")
    more = {} if value is None else {"value": value}
    try:
        return optax.with_extra_args_support(optimizer).update(mean, opt_state, params, **more)
    except TypeError as error:
        missing = re.search(r"missing \d+ required keyword-only arguments?: (.*)", str(error))
        if missing is None:
            raise
        names = re.findall(r"'(\w+)'", missing.group(1))
        if names == ["value"]:
            raise InputError(
                "optimizer asks for value, the loss, which is not private; give private_loss=PrivateLoss(bound=...)"
            ) from None
        raise InputError(
            f"optimizer asks for {', '.join(names)}, computed from the data without noise; use one that needs the "
            "gradient alone, or the loss (value) besides"
        ) from None


def unmoved(optimizer: Any, opt_state: Any, params: Any, value: Any = None) -> list[str]:
    """Return the paths of parameters whose updates ignore the gradient, as under a masked `optax.set_to_zero`."""
    closed = trace(lambda mean, state: updated(optimizer, mean, state, params, value)[0], params, opt_state)
    names = paths(params)
    moved = set(closed.jaxpr.invars[: len(names)])
    for eqn in closed.jaxpr.eqns:
        if any(var in moved for var in eqn.invars if not isinstance(var, Literal)):
            moved.update(eqn.outvars)
    outputs = closed.jaxpr.outvars
    return [name for name, var in zip(names, outputs, strict=True) if isinstance(var, Literal) or var not in moved]


def look_at(optimizer: Any, opt_state: Any, params: Any, private_loss: PrivateLoss | None) -> None:
    """Raise InputError if the optimizer asks for non-private values; warn of parameters that it never moves."""
    value = None if private_loss is None else jnp.float32(0)
    still = unmoved(optimizer, opt_state, params, value)
    if still:
        more = f" and {len(still) - 1} more" if len(still) > 1 else ""
        warnings.warn(
            f"optimizer never moves {still[0]}{more}: they still share the clip norm and get noise; "
            "freeze them with trainable= instead",
            stacklevel=3,
        )


class Averaged(NamedTuple):
    """State of an `averaged` optimizer.

    Parameters
    ----------
    inner, count : the state of the optimizer itself, and the number of steps taken.
    average : the moving average of the parameters, in float32 or wider.  Like the parameters it may be published.

    References
    ----------
    De et al. 2022, arXiv:2204.13650, section 3.3.

    >>> import jax.numpy as jnp, optax
    >>> averaged(optax.sgd(0.1)).init(jnp.ones(2)).average
    Array([1., 1.], dtype=float32)
    """

    inner: Leaf
    average: Leaf
    count: Leaf


def averaged(optimizer: Foreign, decay: float = 0.9999) -> Foreign:
    """Return an optimizer that makes the same updates and also keeps a moving average of the parameters in its state.

    After step t the average is d a + (1 - d) p, with a the previous average, p the new parameters, and
    d = min(decay, (1 + t)/(10 + t)).  The average depends on released parameters alone, so it costs no privacy.
    `state.opt_state.average` holds it; `params_of(folder, average=True)` reads it from a checkpoint.

    Parameters
    ----------
    optimizer, decay : an Optax transformation, and a number in (0, 1).

    Returns
    -------
    An Optax transformation with the state `Averaged`.

    References
    ----------
    De et al. 2022, arXiv:2204.13650, section 3.3.

    >>> import jax.numpy as jnp, optax
    >>> from jaxacct.training import Plan, Trainer, averaged
    >>> plan = Plan(target_delta=1e-5, dataset_size=10, sampling_probability=1.0, noise_multiplier=5.0, steps=3)
    >>> trainer = Trainer(lambda w, x: jnp.sum((w - x) ** 2), averaged(optax.sgd(0.1)), plan, clip_norm=1.0)
    >>> state = trainer.fit(trainer.init(jnp.zeros(2)), jnp.ones((10, 2)), progress=False)
    >>> state.opt_state.average.shape, int(state.opt_state.count)
    ((2,), 3)
    """
    require_optimizer(optimizer)
    most = float(check_one("decay", decay, OPEN_PROBABILITY, "one number for all parameters"))
    optax = optional_package("optax", "a moving average of parameters")
    inner = optax.with_extra_args_support(optimizer)
    wide = lambda array: jnp.copy(array).astype(jnp.promote_types(array.dtype, jnp.float32))

    def init(params: Any) -> Averaged:
        return Averaged(inner.init(params), jax.tree.map(wide, params), jnp.int32(0))

    def update(gradient: Any, state: Averaged, params: Any, **more: Any) -> tuple[Any, Averaged]:
        updates, own = inner.update(gradient, state.inner, params, **more)
        count = state.count + 1
        kept = jnp.minimum(most, (1.0 + count) / (10.0 + count))
        mixed = lambda before, new: (kept * before + (1.0 - kept) * new).astype(before.dtype)
        average = jax.tree.map(mixed, state.average, optax.apply_updates(params, updates))
        return updates, Averaged(own, average, count)

    return optax.GradientTransformationExtraArgs(init, update)
