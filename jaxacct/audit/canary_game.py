"""Makes canaries, and runs a trainer's own step many times at once, with the canaries and without."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from jaxacct.audit.selection_game import SEED_RANGE
from jaxacct.core.files import optional_package
from jaxacct.core.progress import Progress
from jaxacct.core.types import ArrayLike, Leaf, PyTree
from jaxacct.core.validation import COUNT, InputError, check
from jaxacct.training import Trainer, sensitivity
from jaxacct.training.step.step_function import Carried, Correlated, numbers_at, own_state
from jaxacct.training.step.step_mechanisms import WITH_PASS_KEYS

REAL_MARK = 0
"""Mark of an example of the data, and of a canary that is an example. The marks of gradient canaries are 1, 2, ..."""
ABSENT_MARK = -1
"""Mark of a canary that does not take part."""
RUNS_AT_ONCE = 256
"""Number of runs that one call of the compiled program computes side by side. The memory limits this number."""


class Played(NamedTuple):
    """Results of runs of a `Game`.

    Parameters
    ----------
    scores : numpy.ndarray, shape (runs, canaries).  A score tends to be larger if the canary took part.
    outcome : pytree of arrays, shape (runs, ...); what ``outcome`` of `Game.play` returned, else the last parameters.

    >>> Played(np.zeros((100, 1)), None).scores.shape
    (100, 1)
    """

    scores: np.ndarray
    outcome: Leaf


class Game:
    """A trainer's own step (sampling, clipping, noise, optimizer) on data with canaries, each in or out of a run.

    `input_canary` and `gradient_canaries` make games.  Each example has a mark.  An example marked as out has the
    gradient 0.

    Parameters
    ----------
    trainer : Trainer
    loss_fn : (params, (example, mark)) -> scalar loss.
    data : pytree of arrays; the canaries are the last examples.
    marks : int32 array, shape (examples,); a gradient canary has its number, every other example `REAL_MARK`.
    observe : (parameters before a step, noisy sum of the step) -> one score for each canary.
    canaries : number of canaries.

    References
    ----------
    README.md of this folder, "Canaries".

    >>> import optax
    >>> from jaxacct.audit import gradient_canaries
    >>> from jaxacct.training import Plan
    >>> plan = Plan(target_delta=1e-5, dataset_size=1, sampling_probability=1.0, noise_multiplier=0.1, steps=1)
    >>> game = gradient_canaries(Trainer(lambda w, x: w @ x, optax.sgd(0.1), plan, clip_norm=1.0), None)
    >>> type(game).__name__, game.canaries
    ('Game', 1)
    """

    def __init__(
        self,
        trainer: Trainer,
        loss_fn: Callable[..., Any],
        data: PyTree,
        marks: np.ndarray,
        observe: Callable[..., Any],
        canaries: int,
    ) -> None:
        plan, size = trainer.plan, marks.shape[0]
        if plan.unit != "record":
            raise InputError(f"unit = {plan.unit!r} of the plan is not supported: a canary is one record; use 'record'")
        rule = trainer.rule
        # AdaptiveClip and private_loss would count a canary that is out. So the absence of a canary would show twice as
        # much as the absence of a record.
        beside = rule.adaptive is not None or rule.private_loss is not None
        if rule.rngs or rule.has_aux or beside or trainer.trainable is not None:
            raise InputError(
                "trainer has rngs, has_aux, an AdaptiveClip, private_loss or trainable, which canaries do not support, "
                "must have none; audit a Trainer without them"
            )
        if size != plan.dataset_size:
            raise InputError(
                f"data and canaries are {size} examples, must be {plan.dataset_size}, the plan's dataset_size; "
                "make the plan for the data with the canaries"
            )
        optimizer, norm = _recorded(rule.optimizer), trainer.clip_norm
        self.trainer = Trainer(loss_fn, optimizer, plan, norm, method=rule.method, micro_batch=rule.micro_batch)
        self.data, self.marks, self.observe, self.canaries = data, marks, observe, canaries
        self._programs: dict[Any, Any] = {}

    def play(
        self,
        params: PyTree,
        present: ArrayLike,
        runs: int,
        *,
        steps: int | None = None,
        seed: int = 0,
        hyperparameters: Mapping[str, Any] | None = None,
        outcome: Callable[[Any], Any] | None = None,
        progress: bool | None = False,
    ) -> Played:
        """Run the trainer `runs` times from `params`, each time with new keys, and give each canary a score.

        Parameters
        ----------
        params : pytree
        present : bool or array_like of bool, shape (canaries,); whether each canary takes part.
        runs : number of runs.
        steps : how many steps of the plan to take, beginning with the first; by default all.
        seed : whole number from 0 to 2^63; it determines all keys.  Use keys from a seed for audits only.
        hyperparameters : name -> values, shape (runs,), such as learning rates.  They need `optax.inject_hyperparams`.
        outcome : a traceable function of a run's last parameters that returns arrays, such as a validation loss.
        progress : whether a line on standard error shows the progress; None shows it only on a terminal.
        """
        runs, seed = int(check("runs", runs, COUNT)), int(check("seed", seed, SEED_RANGE))
        plan = self.trainer.plan
        steps = plan.steps if steps is None else int(check("steps", steps, COUNT))
        if steps > plan.steps:
            raise InputError(f"steps = {steps} must be <= {plan.steps}; the plan has no more")
        there = np.broadcast_to(np.asarray(present, bool), (self.canaries,))
        marks = self.marks.copy()
        marks[-self.canaries :] = np.where(there, marks[-self.canaries :], ABSENT_MARK)
        varied = {name: np.asarray(values, np.float32) for name, values in (hyperparameters or {}).items()}
        self._check_varied(params, varied, runs)
        program = self._program(steps, outcome)
        rng = np.random.default_rng(np.random.SeedSequence([seed, *np.packbits(there).tolist()]))
        params = jax.tree.map(jnp.asarray, params)
        bar, found = Progress(runs, progress, unit="runs"), []
        passes = plan.pass_of(steps - 1)[0] + 1 if plan.sampling in WITH_PASS_KEYS else 1
        for start in range(0, runs, RUNS_AT_ONCE):
            words = rng.integers(0, 2**32, (RUNS_AT_ONCE, steps + passes, 8), np.uint32)
            rows = np.minimum(np.arange(start, start + RUNS_AT_ONCE), runs - 1)
            now = {name: values[rows] for name, values in varied.items()}
            found.append(program(params, (self.data, marks), now, words))
            jax.block_until_ready(found[-1])
            bar.update(min(start + RUNS_AT_ONCE, runs))
        bar.close()
        joined = jax.tree.map(lambda *pieces: np.concatenate([np.asarray(x) for x in pieces])[:runs], *found)
        return Played(*joined)

    def _check_varied(self, params: Any, varied: Mapping[str, np.ndarray], runs: int) -> None:
        """Raise InputError unless each hyper-parameter is one of the optimizer's and has a value for each run."""
        known = getattr(self.trainer.optimizer.init(params)[0], "hyperparams", {}) if varied else {}
        for name, values in varied.items():
            if name not in known:
                raise InputError(
                    f"hyperparameters[{name!r}] is none of the optimizer's; make it by optax.inject_hyperparams"
                )
            if values.shape != (runs,):
                raise InputError(f"hyperparameters[{name!r}] has shape {values.shape}, must be ({runs},); one per run")

    def _program(self, steps: int, outcome: Callable[[Any], Any] | None) -> Any:
        """Return the program that computes whole runs side by side, compiled once for each `steps` and `outcome`."""
        key = steps, outcome
        if key not in self._programs:
            trainer, plan = self.trainer, self.trainer.plan
            each = [numbers_at(plan, t, None) for t in range(steps)]
            stacked = jax.tree.map(lambda *x: np.stack(x), *each)
            which = np.array([plan.pass_of(t)[0] if plan.sampling in WITH_PASS_KEYS else 0 for t in range(steps)])

            def run(params: Any, data: Any, varied: Any, words: Any) -> Any:
                norm = jax.tree.map(lambda c: jnp.asarray(c, jnp.float32), trainer.clip_norm)
                begun = trainer.rule.begin(params)
                inner, mean = own_state(begun)
                if varied:
                    inner = inner._replace(hyperparams=inner.hyperparams | varied)
                own = inner, mean
                begun = begun._replace(own=own) if isinstance(begun, Correlated) else own
                start = Carried(params, begun, norm, jnp.int32(0))

                def step(carried: Carried, now: Any) -> Any:
                    key, pass_key, settings = now
                    after, _ = trainer.step_function(carried, key, pass_key, data, settings)
                    noisy = jax.tree.map(lambda g: g * settings.expected_batch_size, own_state(after.opt_state)[1])
                    return after, self.observe(carried.params, noisy)

                keys = words[:steps], words[steps:][which], stacked
                last, seen = jax.lax.scan(step, start, keys)
                return jnp.sum(seen, axis=0), (last.params if outcome is None else outcome(last.params))

            self._programs[key] = jax.jit(jax.vmap(run, in_axes=(None, None, 0, 0)))
        return self._programs[key]


def _recorded(optimizer: Any) -> Any:
    """Return the optimizer, with a state that also holds the last noisy mean that the optimizer got."""
    optax = optional_package("optax", "an audit")

    def init(params: Any) -> Any:
        return optimizer.init(params), jax.tree.map(jnp.zeros_like, params)

    def update(mean: Any, state: Any, params: Any = None) -> Any:
        updates, inner = optimizer.update(mean, state[0], params)
        return updates, (inner, mean)

    return optax.GradientTransformation(init, update)


def gradient_canaries(trainer: Trainer, data: PyTree, count: int = 1) -> Game:
    """Make canaries with planted gradients: canary j has a gradient along coordinate j of the flattened parameters.

    The gradient is clipped to C, the clip norm.  A canary that takes part in a step moves the clipped sum by C along
    its coordinate, up to rounding.  Its score is the noisy sum at this coordinate, added over all steps, in units of C.
    The trainer clips planted gradients one example at a time.  To audit clipping by ghost norms, use `input_canary`.

    Parameters
    ----------
    trainer : its plan's dataset_size counts ``data`` and the canaries.  It has one clip norm for all parameters.
    data : pytree of arrays, the examples along the first axis; None for no other examples.
    count : number of canaries.

    Returns
    -------
    Game

    References
    ----------
    README.md of this folder, "Canaries".

    >>> import optax
    >>> from jaxacct.training import Plan
    >>> plan = Plan(target_delta=1e-5, dataset_size=1, sampling_probability=1.0, noise_multiplier=0.1, steps=2)
    >>> trainer = Trainer(lambda w, x: w @ x, optax.sgd(0.1), plan, clip_norm=3.0)
    >>> game = gradient_canaries(trainer, None)
    >>> float(game.play(jnp.zeros(4), True, runs=100).scores.mean().round(1))
    2.0
    """
    count = int(check("count", count, COUNT))
    if len(jax.tree_util.tree_leaves(trainer.clip_norm)) != 1:
        raise InputError("clip_norm must be one number for gradient canaries; use input_canary")
    norm = sensitivity(trainer.clip_norm)
    loss_fn = trainer.loss_fn

    def planted(params: Any, marked: Any) -> Any:
        example, mark = marked
        flat = ravel_pytree(params)[0]
        if flat.size < count:
            raise InputError(f"count = {count} must be <= {flat.size}, the number of parameters; plant fewer")
        # The gradient of `pull` has the norm 1e4 C, so large that every method of clipping reduces the norm to C.
        pull = jnp.where(mark > 0, 1e4 * norm * flat[jnp.maximum(mark - 1, 0)], 0.0)
        return pull if example is None else pull + jnp.where(mark == REAL_MARK, loss_fn(params, example), 0.0)

    observe = lambda params, noisy: ravel_pytree(noisy)[0][:count] / norm
    marks = np.arange(1, count + 1, dtype=np.int32)
    if data is not None:
        size = jax.tree_util.tree_leaves(data)[0].shape[0]
        data = jax.tree.map(lambda a: np.concatenate([a, np.repeat(a[:1], count, axis=0)]), jax.device_get(data))
        marks = np.concatenate([np.full(size, REAL_MARK, np.int32), marks])
    return Game(trainer, planted, data, marks, observe, count)


def input_canary(trainer: Trainer, data: PyTree, example: PyTree) -> Game:
    """Make a game whose canary is a crafted example, such as an image from elsewhere, or one with a wrong label.

    The score is the inner product of the noisy sum with the canary's own clipped gradient, added over all steps, in
    units of the squared clip norm.  An adversary who computes the score knows the parameters before every step.

    Parameters
    ----------
    trainer : its plan's dataset_size is one more than the number of examples in ``data``.
    data : pytree of arrays, the examples along the first axis.
    example : the canary, shaped like one example of the data.

    Returns
    -------
    Game

    References
    ----------
    Nasr et al. (2023).

    >>> import optax
    >>> from jaxacct.training import Plan
    >>> plan = Plan(target_delta=1e-5, dataset_size=3, sampling_probability=1.0, noise_multiplier=0.1, steps=1)
    >>> trainer = Trainer(lambda w, x: w @ x, optax.sgd(0.1), plan, clip_norm=1.0)
    >>> game = input_canary(trainer, jnp.zeros((2, 2)), jnp.array([0.0, 7.0]))
    >>> [abs(float(game.play(jnp.zeros(2), there, runs=100).scores.mean().round(1))) for there in (True, False)]
    [1.0, 0.0]
    """
    loss_fn = trainer.loss_fn
    crafted, norm = jax.tree.map(jnp.asarray, example), sensitivity(trainer.clip_norm)
    whole = jax.tree.map(lambda a, b: np.concatenate([a, b[None].astype(a.dtype)]), *jax.device_get((data, crafted)))
    size = jax.tree_util.tree_leaves(whole)[0].shape[0]

    def marked_loss(params: Any, marked: Any) -> Any:
        one, mark = marked
        return jnp.where(mark == ABSENT_MARK, 0.0, loss_fn(params, one))

    def observe(params: Any, noisy: Any) -> Any:
        own = ravel_pytree(jax.grad(loss_fn)(params, crafted))[0]
        return (ravel_pytree(noisy)[0] @ own / (norm * jnp.maximum(jnp.linalg.norm(own), norm)))[None]

    return Game(trainer, marked_loss, whole, np.full(size, REAL_MARK, np.int32), observe, 1)
