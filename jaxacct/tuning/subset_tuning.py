"""Tuning on a secret Poisson sample of the data, then one training of the winner's configuration: `tune_on_subset`."""

from __future__ import annotations

import bisect
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxacct.core.bounds import Bounds
from jaxacct.core.types import Leaf, PyTree
from jaxacct.core.validation import InputError, choice
from jaxacct.mechanisms import Mechanism
from jaxacct.training.ledger import Ledger
from jaxacct.training.plan import Plan
from jaxacct.training.plan.segments import Segment
from jaxacct.training.run.state import Released
from jaxacct.training.sampling import sampler
from jaxacct.training.source import require_rows
from jaxacct.tuning.candidates import Secret, drawn, key_words, require_side_by_side, selected, several, side_by_side
from jaxacct.tuning.plans import Cost, Setting, SubsetPlan, plan_of
from jaxacct.tuning.search_spaces import Sampled, draws_alike
from jaxacct.tuning.tuning_run import note_whole, value_of

EXTRAPOLATIONS = ("sgd", "adam")


@dataclass(frozen=True, eq=False, repr=False)
class SubsetTuned(Released):
    """Release of `tune_on_subset`, all of it covered by `epsilon`.

    Parameters
    ----------
    params, config : the parameters of the final run, a pytree, and its configuration.
    tuned_config, score : the winner's configuration before extrapolation, and its score: NaN with status "none".
    setting, cost : the rate, steps and noise of the runs; the number of gradient evaluations under the law of K.
    status : "tuned"; "none" if K was 0 or the best candidate raised an exception: then config depends on no data.
    epsilon, mechanism : epsilon of the whole tuning at the plan's delta; the tuning as one mechanism, as in the ledger.
    target_delta : the plan's delta.

    >>> import jaxacct as ja
    >>> from jaxacct import selection
    >>> run, cost = ja.Gaussian(2.0), Cost(selection.Poisson(15), 60_000, 40, "rest", 0.1)
    >>> rate = {"learning_rate": 0.9}
    >>> setting = Setting(0.02, 100, 1.0, 1.0)
    >>> SubsetTuned(np.zeros(2), rate, rate, setting, 0.8, "tuned", ja.epsilon(run, 1e-5), run, cost, 1e-5)
    SubsetTuned(tuned, {'learning_rate': 0.9}, score 0.8, epsilon <= 1.993092 at delta 1e-05, 2 parameters)
    """

    params: Leaf
    config: dict[str, Any]
    tuned_config: dict[str, Any]
    setting: Setting
    score: float
    status: str
    epsilon: Bounds
    mechanism: Mechanism
    cost: Cost
    target_delta: float | None = None


def tune_on_subset(
    loss_fn: Callable[[Any, Any], Any],
    make_optimizer: Callable[[Mapping[str, Any]], Any],
    space: Sampled,
    data: PyTree,
    plan: SubsetPlan,
    *,
    init: Callable[[Any], Any],
    score: Callable[[Any], Any],
    candidates: str | None = None,
    extrapolate: str | Callable[[dict[str, Any], float], dict[str, Any]] = "sgd",
    warm_start: bool = False,
    clip_norm: PyTree = 1.0,
    method: str = "auto",
    micro_batch: int | None = None,
    ledger: Ledger | str | os.PathLike[str] | None = None,
    key: bytes | None = None,
) -> SubsetTuned:
    """Tune on a Poisson sample of the data, then train the winner's configuration on the other data or on all data.

    Tuning and training together have the guarantee of the plan, for adding or removing a record.  The configuration and
    the trained model are released; the sample, K, the losers and their scores stay in this function, but the running
    time reveals K and the size of the sample.  One ledger entry for both is on the disk before the sample is drawn.

    Parameters
    ----------
    loss_fn : (params, example) -> scalar.
    make_optimizer : config -> Optax transformation, as for `side_by_side`.
    space : has ``sample(key) -> config``, a dict of numbers; draws must not depend on the data.
    data, plan : pytree of arrays, plan.dataset_size records along the first axis, and a `SubsetPlan`.
    init : JAX key -> initial parameters, of equal shapes for all keys.
    score : as for `tune`, but it must depend on public data only.
    candidates : "iid" declares draws i.i.d.  It is required unless space is a `Grid`, or a `Random` with library laws.
    extrapolate : "sgd", "adam" or a function (config, growth) -> config, as for `extrapolated`, with plan.growth.
    warm_start : whether the final run begins at the winner's parameters (Remark 3 of Koskela and Kulkarni covers this).
    clip_norm, method, micro_batch : as for `side_by_side`.
    ledger, key : as for `tune`.

    Returns
    -------
    SubsetTuned

    References
    ----------
    Koskela and Kulkarni (2023); README.md of this folder, "Tuning on a random subset".

    >>> import jax.numpy as jnp, optax
    >>> from jaxacct import selection
    >>> from jaxacct.tuning import grid
    >>> plan = SubsetPlan(8.0, 1e-5, 100, 0.2, selection.Poisson(3), sampling_probability=1.0, steps=2)
    >>> done = tune_on_subset(lambda w, x: jnp.sum((w - x) ** 2), lambda c: optax.sgd(c["learning_rate"]),
    ...     grid(learning_rate=[0.01, 0.1]),
    ...     np.ones((100, 2)), plan, init=lambda key: jnp.zeros(2), score=lambda w: -jnp.sum((w - 1.0) ** 2))
    >>> done.params.shape, bool(done.epsilon.upper <= 8.0)
    ((2,), True)
    """
    if not isinstance(plan, SubsetPlan):
        raise InputError("plan must be a SubsetPlan; use tuning.SubsetPlan(target_epsilon=..., ...)")
    alike = draws_alike(space)
    if choice("candidates", candidates or "iid", ("iid",)) and candidates is None and not alike:
        raise InputError(
            f"space of type {type(space).__name__} may keep state, which is not covered here; use tuning.Random or "
            "tuning.Grid, or declare candidates='iid' if all its draws are independent and from one law"
        )
    if not callable(extrapolate):
        choice("extrapolate", extrapolate, EXTRAPOLATIONS)
    if not callable(score):
        raise InputError("score must be a function of params on public data; a private score is not accounted for here")
    require_rows(data, plan.dataset_size)
    secret = Secret(key, data, plan.mechanism)
    setting = plan.settings[0]
    # `note_whole` creates a new ledger with the plan of the final run
    run = plan_of(plan, setting.sampling_probability, setting.steps, setting.final_noise)
    word = "iid" if alike else "iid, declared"
    note = f"tuning on a share of {plan.share:g}, and a final run: {plan.variant}; candidates {word}"
    shared = {"clip_norm": clip_norm, "method": method, "micro_batch": micro_batch}

    def run_of(setting: Setting, final: bool, size: int) -> Plan:
        noise = setting.final_noise if final else setting.tuning_noise
        # DP-SGD divides each noisy sum by this expected batch size, which does not depend on the secret sample
        batch = plan.expected_batch_size(setting, final)
        segment = Segment(0, setting.steps, noise, setting.sampling_probability, batch)
        return _OfSample.of([segment], target_delta=plan.target_delta, dataset_size=size)

    for each, final in itertools.product(plan.settings, (False, True)):
        require_side_by_side(run_of(each, final, plan.dataset_size), **shared)

    def trainer(setting: Setting, final: bool, trial: bool = False) -> Callable[..., Any]:
        """Return a function (params, configs, keys) -> params that trains several runs and is compiled once."""
        held = outside if final else inside
        run = run_of(setting, final, len(held[1]))
        train = side_by_side(loss_fn, make_optimizer, run, filled_up=True, **shared)
        return lambda params, configs, keys: train(params, configs, keys, held, data, trial)

    settings = plan.settings
    # a trial candidate, which is not trained, shows errors of the program before anything is spent
    inside = outside = _held(data, np.arange(0), _room(plan.dataset_size, plan.share))
    apart = Secret(secret.root(b"trial"))
    config = drawn(space, apart, 0)
    extrapolated(config, plan.growth, extrapolate)
    several(trainer(setting, False, True), apart, init, [config])([0])
    note_whole(ledger, run, plan.mechanism, note, plan.target_epsilon)
    inside, outside = _split(secret.key(b"sample"), data, plan)
    place = lambda number: secret.choice(b"setting", number, len(settings))
    kind_of = lambda _, number: place(number)
    group = lambda kind, configs: several(trainer(settings[kind], False), secret, init, configs)
    value = value_of(score, secret)
    found, configs = selected(space, plan.repetitions, None, 1, secret, False, kind_of, group, value)
    # without a winner, take the first configuration, which does not depend on the data
    number, tuned, won = found[0] if found else (0, None, math.nan)
    winner, setting = configs[number], settings[place(number)]
    config = extrapolated(winner, plan.growth, extrapolate)
    first = tuned if warm_start and found else init(secret.key(b"first"))
    one = jax.tree.map(lambda x: np.asarray(x)[None], (first, config))
    params = jax.tree.map(lambda x: x[0], trainer(setting, True)(*one, key_words([secret.root(b"final")])))
    done = params, config, winner, setting, won, "tuned" if found else "none"
    return SubsetTuned(*done, plan.epsilon, plan.mechanism, plan.cost, plan.target_delta)


class _OfSample(Plan):
    """Plan of a run on a secret sample.  The sample's size is not known beforehand, so it sets no batch size."""

    @staticmethod
    def _require_sizes(settings: dict[str, Any], segments: Sequence[Segment]) -> None:
        """Allow any batch size: Poisson samples are drawn by the rate, and the size only divides the noisy sums."""


def extrapolated(
    config: Mapping[str, Any], growth: float, rule: str | Callable[[dict[str, Any], float], Mapping[str, Any]] = "sgd"
) -> dict[str, Any]:
    """Return the configuration for `growth` times as many records: "sgd" multiplies the learning rate, "adam" keeps it.

    At equal rate, noise multiplier and steps, "sgd" keeps DP-SGD's noise, proportional to learning rate / batch size.

    Parameters
    ----------
    config, growth : a mapping, and the factor by which the number of records grows.
    rule : "sgd", "adam", or a function that maps (config, growth) to a config.

    Returns
    -------
    dict

    References
    ----------
    van der Veen et al. (2018); Koskela and Kulkarni (2023), section 3.2.

    >>> extrapolated({"learning_rate": 0.1, "clip_norm": 1.0}, 9.0)["learning_rate"].__round__(9)
    0.9
    """
    if callable(rule):
        return dict(rule(dict(config), growth))
    if choice("extrapolate", rule, EXTRAPOLATIONS) == "adam":
        return dict(config)
    if "learning_rate" not in config:
        raise InputError(
            f"the configuration {sorted(config)} has no 'learning_rate'; name it so, or give extrapolate a function"
        )
    return {**config, "learning_rate": config["learning_rate"] * growth}


def _split(key: Any, data: Any, plan: SubsetPlan) -> tuple[Any, Any]:
    """Draw the sample. Return a pair (rows, mask of the true rows) for the tuning, and another for the final run."""
    words = np.asarray(jax.random.key_data(key))  # `host_poisson` takes the key as words, and compiles no program
    inside = sampler.host_poisson(words, plan.dataset_size, sampler.threshold(plan.share))
    everyone = np.arange(plan.dataset_size)
    sample = _held(data, inside, _room(plan.dataset_size, plan.share))
    if plan.variant == "all":
        return sample, _held(data, everyone, plan.dataset_size)
    return sample, _held(data, np.setdiff1d(everyone, inside), _room(plan.dataset_size, 1.0 - plan.share))


def _room(size: int, share: float) -> int:
    """Return the number of rows held for a sample. With chance <= 1e-18 a sample has more, and JAX recompiles."""
    from scipy.stats import binom  # whose `isf` is wrong below 1e-16

    return max(bisect.bisect_left(range(size), True, key=lambda most: binom.sf(most, size, share) <= 1e-18), 1)


def _held(data: Any, rows: np.ndarray, room: int) -> tuple[Any, np.ndarray]:
    """Return the given rows of the data, filled up to `room` rows, and a mask that is False in the added rows."""
    filled = np.concatenate([rows, np.zeros(max(room - len(rows), 0), rows.dtype)])
    return jax.tree.map(lambda a: np.asarray(a)[filled], data), np.arange(len(filled)) < len(rows)
