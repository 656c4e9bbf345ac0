"""Training of K candidates, in chunks whose shapes do not depend on K, and the choice of the best by a rank."""

from __future__ import annotations

import contextlib
import hmac
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxacct.core.chacha import CHACHA20, host_fold_in, key_from_bytes, secret_bytes
from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.progress import Progress
from jaxacct.core.types import Leaf, PyTree
from jaxacct.core.validation import COUNT, InputError, check, choice
from jaxacct.mechanisms import Mechanism
from jaxacct.selection import Categorical, Law
from jaxacct.training.clipping.clipped_sum import CLIP_NORM, METHODS, sensitivity
from jaxacct.training.clipping.examples_apart import refuse_closed_over, refuse_records
from jaxacct.training.clipping.traces import refuse_kept
from jaxacct.training.plan import Plan
from jaxacct.training.plan.plan import UNUSUAL, require_plan
from jaxacct.training.run.state import Released
from jaxacct.training.source import require_rows
from jaxacct.training.step import noise
from jaxacct.training.step.counts_and_losses import AdaptiveClip, PrivateLoss, gradient_noise
from jaxacct.training.step.key_derivation import digest, digest_tree
from jaxacct.training.step.models import Untrained, join_model, split_model
from jaxacct.training.step.step_function import Carried, Numbers, StepRule, draws, numbers_at, private_step
from jaxacct.training.step.step_mechanisms import BY_PASS, OF_ONE_SIZE, WITH_NOISE
from jaxacct.tuning.search_spaces import plain

STEP_STREAM = 5
"""`purpose` of `noise.stream` for step keys (PASS_STREAM: pass keys).  `training.step.noise` uses 1 to 4 and 7 to 9."""
PASS_STREAM = 6
STEPS_PER_CALL = 128
"""Number of training steps in one call of the compiled program; training can be interrupted between two calls."""
CANDIDATES_PER_CALL = 16
"""Number of candidates in one call of the compiled program.  It is fixed, so that array shapes do not depend on K."""


@dataclass(frozen=True, repr=False)
class Winner(Released):
    """The candidate that a tuning releases.

    Parameters
    ----------
    params, config, score : the candidate's parameters (a pytree), its hyper-parameters, and the score by which it won.
    plan : the plan of the candidate's training; None in `tune_with`.

    >>> Winner(np.zeros(2), {"rate": 0.1}, 0.9)
    Winner({'rate': 0.1}, score 0.9, 2 parameters)
    """

    params: Leaf
    config: dict[str, Any]
    score: float
    plan: Plan | None = None


@dataclass(frozen=True)
class Tried:
    """A trained and scored candidate of an `Adaptive` search.

    Parameters
    ----------
    config, score : the candidate's hyper-parameters, and its score: NaN if training or scoring raised an exception.
    result : the candidate's parameters, or the result of `train` in `tune_with`; None if an exception was raised.

    >>> Tried({"rate": 0.1}, 0.9, None).score
    0.9
    """

    config: dict[str, Any]
    score: float
    result: Leaf = field(repr=False)


@dataclass(frozen=True)
class Adaptive:
    """A search without a space of configurations: a function proposes each candidate, given all that were tried before.

    Bayesian optimisation, successive halving, hill climbing and warm starts are adaptive searches.  Candidates are
    trained one after the other.  The guarantee covers the whole history, even if K is public; choose a fixed K, since a
    random K costs more privacy and brings nothing.

    Parameters
    ----------
    propose : (history, key) -> config, a dict of numbers and strings.  The history is a tuple of `Tried`, in order; the
        JAX key is for random choices.  The function must not look at the data in any other way.

    References
    ----------
    jaxacct/selection/README.md, "Candidates that depend on each other".

    >>> def propose(history, key):
    ...     return {"rate": 0.1 * 2.0 ** len(history)}
    >>> Adaptive(propose).proposed([], None)
    {'rate': 0.1}
    """

    propose: Callable[[tuple[Tried, ...], Any], Mapping[str, Any]]

    def __post_init__(self) -> None:
        if not callable(self.propose):
            raise InputError(f"propose = {self.propose!r:.40} must be a function (history, key) -> config")

    def proposed(self, history: Sequence[Tried], key: jax.Array) -> dict[str, Any]:
        """Return the next configuration."""
        found = self.propose(tuple(history), key)
        if not isinstance(found, Mapping):
            raise InputError(f"propose gives {type(found).__name__}, must give a mapping of names to numbers and words")
        return {name: plain(value) for name, value in found.items()}


class Secret:
    """Derives all keys of a tuning from 32 secret bytes, `root`; by default the operating system gives the bytes."""

    def __init__(self, root: bytes | None, data: PyTree = None, mechanism: Mechanism | None = None) -> None:
        self._root = secret_bytes(root)
        # used again with other data or another plan, a given key gives other noise
        if root is not None and mechanism is not None:
            about = digest(digest_tree(data), mechanism.expression().encode())
            self._root = hmac.digest(self._root, about, "sha256")

    def root(self, purpose: bytes, number: int = 0) -> bytes:
        """Return 32 secret bytes, derived for one purpose and one candidate (`number`)."""
        return hmac.digest(self._root, purpose + number.to_bytes(8, "little"), "sha256")

    def choice(self, purpose: bytes, number: int, size: int) -> int:
        """Return a uniform random integer below `size`. It follows from the root key, the purpose and the candidate."""
        return int.from_bytes(self.root(purpose, number)[:16], "little") * size >> 128

    def key(self, purpose: bytes, number: int = 0) -> Any:
        """Return a ChaCha20 key for one purpose and candidate."""
        return key_from_bytes(self.root(purpose, number))


def truncated(law: Law, most: int) -> Categorical:
    """Return the law of K, conditioned on K <= most.  If `tune` gets a `pad`, K must not exceed it: use most <= pad.

    Parameters
    ----------
    law, most : one law of K, and the largest K; refused if Pr[K <= most] is below 1e-3.

    Returns
    -------
    Categorical

    >>> from jaxacct import selection
    >>> truncated(selection.Geometric(0.5), 2).probabilities.round(6).tolist()
    [0.0, 0.666667, 0.333333]
    """
    number = int(check("most", most, COUNT))
    if law.shape:
        raise InputError(f"law of shape {law.shape} must be one law of K; truncate its elements one by one")
    mass = np.asarray(law.probability(np.arange(number + 1)), np.float64)
    total = math.fsum(mass)
    if total < 1e-3:
        raise InputError(f"most = {number}: K is at most that with probability {total:.2g}; raise it")
    return Categorical(mass / total)


def require_pad(law: Law, space: Any, pad: int | None) -> None:
    """With `pad`, the number of candidates that are always trained, refuse a K that is public or can exceed `pad`."""
    if pad is None:
        return
    if isinstance(space, Adaptive):
        raise InputError(
            f"pad = {pad!r} is for a secret K; leave it out, since an Adaptive search pays for a public one"
        )
    most = int(check("pad", pad, COUNT))
    every = math.fsum(law.probability(np.arange(most + 1)))
    if float(law.quantile(1.0 - ROUNDOFF)) > most or not math.isclose(every, 1.0):
        raise InputError(f"pad = {most}: K can be larger; use tuning.truncated(law, {most}) as the law of K")


class Raised(NamedTuple):
    """Stands for the result of a candidate whose training raised an exception, and holds nothing of the exception."""


class Found(NamedTuple):
    """A candidate that was trained and scored."""

    number: int
    result: Any
    score: float


Group = Callable[[Sequence[int]], Sequence[Any]]
"""Function that trains some candidates of one kind, by their numbers, and returns their results."""


def rank(score: float, number: int) -> tuple[bool, float, int]:
    """Return a sort key that does not depend on K: larger scores win, NaN is last, and the first drawn wins a tie."""
    known = not math.isnan(score)
    return known, score if known else 0.0, -number


def selected(
    space: Any,
    law: Law,
    pad: int | None,
    top: int,
    secret: Secret,
    progress: bool | None,
    kind_of: Callable[[Mapping[str, Any], int], Hashable],  # (config, number) -> kind; equal kinds are trained together
    group: Callable[[Any, Sequence[Mapping[str, Any]]], Group],  # (kind, configs) -> a `Group` for this kind
    value: Callable[[Any, int], float],  # (result, number) -> score
    together: int = CANDIDATES_PER_CALL,
    first: dict[str, Any] | None = None,  # configs[0], if it is already drawn
) -> tuple[list[Found], list[dict[str, Any]]]:
    """Draw K and train.  Return (best `top` of K, best first; configs).  configs[0] always exists and uses no data."""
    require_pad(law, space, pad)
    count = law.sample()
    if isinstance(space, Adaptive):
        # `propose` sees only outputs that are accounted for, and K is public, so exceptions of `propose` are not hidden
        configs = [drawn(space, secret, 0) if first is None else first]
        history: list[Tried] = []
        best: list[Found] = []
        with contextlib.closing(Progress(count, progress, unit="candidates")) as bar:
            for number in range(count):
                if number:
                    configs.append(space.proposed(history, secret.key(b"config", number)))
                config = configs[number]
                result = _attempt(lambda n=number, config=config: group(kind_of(config, n), configs)([n])[0])
                one = _scored(number, result, value)
                history.append(Tried(config, one.score, None if isinstance(one.result, Raised) else one.result))
                best = _best([*best, one], top)
                bar.update(number + 1)
        return [one for one in best if not isinstance(one.result, Raised)], configs
    work = count if pad is None else pad
    configs = [drawn(space, secret, 0) if first is None else first]
    configs += [drawn(space, secret, number) for number in range(1, work)]
    kinds = [kind_of(config, number) for number, config in enumerate(configs[:work])]
    bar = Progress(work, progress if pad else False, unit="candidates")
    return best_few(kinds, lambda kind: group(kind, configs), value, count, top, bar, together), configs


def drawn(space: Any, secret: Secret, number: int) -> dict[str, Any]:
    """Return the configuration of a candidate.  Of an Adaptive search only candidate 0 is known without a history."""
    key = secret.key(b"config", number)
    return space.proposed([], key) if isinstance(space, Adaptive) else dict(space.sample(key))


def best_few(
    kinds: Sequence[Hashable],
    group: Callable[[Any], Group],
    value: Callable[[Any, int], float],
    count: int,
    top: int,
    bar: Progress,
    together: int = CANDIDATES_PER_CALL,
) -> list[Found]:
    """Train and score all candidates; return the best `top` of the first `count`, without candidates that raised."""
    members: dict[Hashable, list[int]] = {}
    for number, kind in enumerate(kinds):
        members.setdefault(kind, []).append(number)
    best: list[Found] = []
    done = 0
    with contextlib.closing(bar):
        for kind, numbers in members.items():
            run = group(kind)
            for start in range(0, len(numbers), together):
                some = numbers[start : start + together]
                filled = some + [some[-1]] * (together - len(some))  # all programs have equal shapes
                for number, result in zip(some, _results(run, some, filled), strict=True):
                    # candidates beyond K are dropped, but only after scoring, so that the time does not reveal K
                    one = _scored(number, result, value)
                    best = _best([*best, one] if number < count else best, top)
                done += len(some)
                bar.update(done)
    return [one for one in best if not isinstance(one.result, Raised)]


def several(
    train: Callable[[Any, Mapping[str, np.ndarray], np.ndarray], Any],
    secret: Secret,
    init: Callable[[Any], Any],
    configs: Sequence[Mapping[str, Any]],
) -> Group:
    """Return a function that trains the candidates with given numbers in one call of `train`."""

    def run(numbers: Sequence[int]) -> list[Any]:
        made = {number: init(secret.key(b"init", number)) for number in dict.fromkeys(numbers)}
        firsts = [made[number] for number in numbers]
        params = jax.tree.map(lambda *x: np.stack([np.asarray(a) for a in x]), *firsts)
        # `train` already has the strings and None, which are equal in all these configs, so pass only the numbers
        names = [name for name, x in configs[numbers[0]].items() if not (x is None or isinstance(x, str))]
        columns = {name: np.array([configs[number][name] for number in numbers]) for name in names}
        done = jax.device_get(train(params, columns, key_words([secret.root(b"train", n) for n in numbers])))
        # copy each row: a view of `done` would carry the parameters of all candidates into the released winner
        return [jax.tree.map(lambda x, row=row: x[row].copy(), done) for row in range(len(numbers))]

    return run


def _attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a user's function, or `Raised` if the function raises an exception."""
    try:
        return function(*arguments)
    except Exception:  # a propagated exception would reveal its message, and how many candidates came before
        return Raised()


def _results(run: Group, some: list[int], filled: list[int]) -> list[Any]:
    """Train a chunk of candidates and return their results; if the chunk raises, train each candidate by itself."""
    together = _attempt(run, filled)
    if not isinstance(together, Raised):
        return list(together)[: len(some)]
    if len(filled) == 1:
        return [together]
    alone = (_attempt(run, [number] * len(filled)) for number in some)
    return [one if isinstance(one, Raised) else one[0] for one in alone]


def _scored(number: int, result: Any, value: Callable[[Any, int], float]) -> Found:
    """Return a candidate with its score; if training or scoring raised, the score is NaN, the result `Raised()`."""
    score = result if isinstance(result, Raised) else _attempt(value, result, number)
    return Found(number, Raised(), math.nan) if isinstance(score, Raised) else Found(number, result, score)


def _best(some: list[Found], top: int) -> list[Found]:
    """Return the best `top` candidates, best first."""
    return sorted(some, key=lambda one: rank(one.score, one.number), reverse=True)[:top]


def require_side_by_side(
    plan: Plan,
    clip_norm: PyTree = 1.0,
    method: str = "auto",
    micro_batch: int | None = None,
    private_loss: PrivateLoss | None = None,
    **_: Any,
) -> None:
    """Raise InputError for arguments that `side_by_side` refuses.  Tunings call this before they spend privacy."""
    require_plan(plan)
    choice("method", method, METHODS)
    adaptive = clip_norm if isinstance(clip_norm, AdaptiveClip) else None
    sensitivity(adaptive.initial if adaptive else clip_norm)  # raises InputError for a bad clip norm
    if plan.sampling in WITH_NOISE:
        raise InputError(f"sampling = {plan.sampling!r} is not supported side by side; train by a Trainer each")
    for name, usual in UNUSUAL.items():
        if name not in ("candidates", "cap") and getattr(plan, name) != usual:
            word = name.replace("rates_digest", "sampling_rates")
            raise InputError(f"{word} is not supported side by side; train each candidate by a Trainer")
    if micro_batch is not None:
        check("micro_batch", micro_batch, COUNT)
    for segment in plan.segments:  # raises InputError if the noisy count and loss leave no budget for gradients
        gradient_noise(segment.noise_multiplier, segment.expected_batch_size, adaptive, private_loss)


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
    filled_up: bool = False,
) -> Callable[..., Any]:
    """Make a function (params, configs, keys, data) -> params that trains n candidates of one plan at once.

    Each candidate runs the trainer's DP-SGD over all steps of the plan, with batches and noise from its own key.  It
    costs as much privacy as ``plan.mechanism``: all n are released, unlike in `tune`, which releases the best.  They
    may differ in numbers that change neither shapes nor privacy: those that make_optimizer reads, and the clip norm.

    Parameters
    ----------
    loss_fn : (params, example) -> scalar loss of one example; with rngs (params, example, key).
    make_optimizer : config -> Optax transformation.  Under vmap the values of a config are traced numbers.
    plan : the plan of each candidate.
    clip_norm : > 0, a pytree of norms, or an AdaptiveClip; used where a config has no "clip_norm" of its own.
    method, rngs, trainable, private_loss : as for the Trainer; frozen parameters are returned unchanged.
    micro_batch : number of examples of each candidate that are processed at a time; by default at most 96.
    filled_up : whether data are (examples, mask), with a bool mask that is False for rows that are no records.

    Returns
    -------
    callable : (params, configs, keys, data) -> the trained parameters, shaped like params, whose leaves have the n
        candidates along the first axis.  configs has n numbers for each name.  keys, from `key_words`, are uint32 of
        shape (n, 8), one for each candidate, never to be used again.  data are the plan's dataset_size examples along
        the first axis.  A candidate that becomes NaN does not affect the others.  Each n is compiled once.

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
    require_side_by_side(plan, clip_norm, method, micro_batch, private_loss)
    adaptive = clip_norm if isinstance(clip_norm, AdaptiveClip) else None
    first_clip = adaptive.initial if adaptive else clip_norm
    size = _room(plan) if micro_batch is None else int(micro_batch)
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
        """Return a candidate's state after steps `start` to `stop - 1`.  `drawn` is the noise on counts and losses."""
        rule = StepRule(loss_fn, make_optimizer(config), plan.sampling, size, method, adaptive, plan.cap)
        step = private_step(replace(rule, rngs=bool(rngs), private_loss=private_loss, filled_up=filled_up))
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
            # the state may hold plain numbers of the config, which must become arrays
            state = jax.tree.map(jnp.asarray, state)
            return Carried(params, state, jax.tree.map(lambda c: jnp.asarray(c, jnp.float32), clip), jnp.int32(0))

        return jax.vmap(of_one)(params, config)

    steps = jax.jit(jax.vmap(one, (None, None, 0, 0, 0, None, 0, 0)))

    def drawn(roots: np.ndarray, start: int, stop: int) -> tuple[Any, Any]:
        """Return (noise for counts, noise for losses) of all candidates in some steps, each None if not released."""
        found: list[Any] = []
        for root in roots:
            keys = host_fold_in(host_fold_in(root, STEP_STREAM), np.arange(start, stop)).T
            rows = [draws(plan.at(start + i), adaptive, private_loss, words) for i, words in enumerate(keys)]
            found.append(rows + rows[-1:] * (STEPS_PER_CALL - len(rows)))  # all calls get arrays of one shape
        count, loss = (
            None if one is None else np.array([[both[i] for both in rows] for rows in found], np.int32)
            for i, one in enumerate((adaptive, private_loss))
        )
        return count, loss

    def train(
        params: Any, configs: Mapping[str, Any], keys: Any, data: Any, private: Any = (), trial: bool = False
    ) -> Any:
        """Train n candidates.  `private` has further private arrays.  A trial traces a step, and trains nothing."""
        pair = isinstance(data, tuple) and len(data) == 2
        if filled_up and not (pair and str(getattr(data[1], "dtype", "")) == "bool"):
            raise InputError("data must be (examples, mask) with a bool array as mask; leave filled_up out otherwise")
        count = _check(plan, params, configs, keys, data)
        private, data = (data, private), jax.tree.map(jnp.asarray, data)
        configs = {name: jnp.asarray(np.asarray(value), jnp.float32) for name, value in configs.items()}
        params = jax.tree.map(jnp.asarray, params)
        trained, rest = (params, None) if trainable is None else split_model(params, trainable)
        distinct = range(1 if trial else count)  # a trial is of one candidate, `count` times
        apart = lambda tree: [jax.tree.map(lambda a, row=row: a[row], tree) for row in distinct]
        refuse_records(apart(trained), private)
        carried = begin(trained, configs)
        words = np.asarray(keys, np.uint32).reshape(count, 8)
        for start in range(0, plan.steps, STEPS_PER_CALL):
            stop = min(start + STEPS_PER_CALL, plan.steps)
            given = (start, stop, carried, configs, words, data, rest, drawn(words, start, stop))
            if start == 0:
                frozen = () if rest is None else apart(rest.frozen)
                traced = steps.trace(*given)
                refuse_kept(traced)
                refuse_closed_over("loss_fn", traced.jaxpr, private, frozen)
                if trial:
                    return params
            carried = steps(*given)
            jax.block_until_ready(carried.params)
        return join_model(carried.params, rest)

    return train


def key_words(roots: Sequence[bytes]) -> np.ndarray:
    """Return the keys of several candidates, each from its own 32 secret bytes.

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
    """Return the size of micro-batches: a batch size that is rarely exceeded, split into equal parts of at most 96."""
    largest = max(plan.segments, key=lambda segment: segment.expected_batch_size)
    expected, q = largest.expected_batch_size, largest.sampling_probability
    spread = 0.0 if plan.sampling in OF_ONE_SIZE else 3.0 * np.sqrt(expected * (1.0 - q))
    most = plan.cap or np.ceil(expected + spread)
    return max(int(np.ceil(most / np.ceil(most / 96))), 1)


def _schedule(
    plan: Plan, adaptive: AdaptiveClip | None, private_loss: PrivateLoss | None
) -> tuple[Numbers, np.ndarray]:
    """Return, for every step, its `Numbers` and the first step of its pass or round (0 if the rule has neither)."""
    steps = range(plan.steps)
    begins = np.array([plan.pass_of(t)[1] if plan.sampling in BY_PASS else 0 for t in steps], np.int32)
    rows = [numbers_at(plan, t, adaptive, private_loss) for t in steps]
    return jax.tree.map(lambda *each: np.stack(each), *rows), begins


def _check(plan: Plan, params: Any, configs: Mapping[str, Any], keys: Any, data: Any) -> int:
    """Return the number of candidates; raise InputError where arguments do not fit each other or the plan."""
    require_rows(data, plan.dataset_size)
    count = int(np.shape(keys)[0])
    for name, value in [*configs.items(), *(("params", leaf) for leaf in jax.tree_util.tree_leaves(params))]:
        if np.shape(value)[:1] != (count,):
            raise InputError(f"{name} has shape {np.shape(value)}, must begin with {count}, the number of keys")
    if "clip_norm" in configs:
        check("clip_norm", configs["clip_norm"], CLIP_NORM)
    return count
