"""Reads and writes strategies and execution plans of jax_privacy, with the fields that they have at commit 07068c9."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxacct.core.files import optional_package
from jaxacct.core.floats import ROUNDOFF
from jaxacct.core.types import Foreign
from jaxacct.core.validation import POSITIVE, REAL, RELATIONS, InputError, check, check_one, choice
from jaxacct.mechanisms import MatrixMechanism
from jaxacct.strategies import BLT, Banded, ColumnNormalised, CyclicPoisson, Strategy, Toeplitz


def from_jax_privacy(thing: Foreign, steps: int = 0, relation: str = RELATIONS[0]) -> Strategy | MatrixMechanism:
    """Read a strategy or an execution plan of jax_privacy, which need not be installed.

    Parameters
    ----------
    thing : array of coefficients, BufferedToeplitz, ColumnNormalizedBanded or BandMFExecutionPlanConfig
    steps : int
        The number of steps n, for coefficients or a `BufferedToeplitz`. If it is 0, the training `Plan` sets n.
    relation : str
        The relation under which epsilon will be computed. For a plan that splits records equally it must be "zero_out"
        or "replace_one".

    Returns
    -------
    Toeplitz, BLT, ColumnNormalised or MatrixMechanism
        A plan becomes the MatrixMechanism that it runs, with one group of records for each coefficient. The plan's
        noise multiplier is taken in units of the norm of the coefficients, also with ``column_normalize``, where the
        columns of the matrix have norm 1.

    >>> from_jax_privacy([1.0, 0.5], steps=4)
    Toeplitz(coefficients=(1.0, 0.5), steps=4, epochs=1)
    """
    choice("relation", relation, RELATIONS)
    if hasattr(thing, "strategy"):
        return _mechanism(thing, relation)
    if hasattr(thing, "params"):
        params = np.asarray(check("params", thing.params, REAL)).T
        return ColumnNormalised(len(params), params[0].size, diagonals=params / np.linalg.norm(params, axis=0))
    if hasattr(thing, "buf_decay"):
        decays, scales = (tuple(np.ravel(each).tolist()) for each in (thing.buf_decay, thing.output_scale))
        return BLT(len(decays), steps, scales=scales, decays=decays)
    return Toeplitz(tuple(np.ravel(check("coefficients", thing, REAL)).tolist()[: steps or None]), steps)


def _mechanism(plan: Any, relation: str) -> MatrixMechanism:
    if plan.noise_multiplier is None:
        raise InputError("noise_multiplier of the plan is None; read plan.calibrate(epsilon=..., delta=...)")
    if plan.truncated_batch_size is not None:
        raise InputError(f"truncated_batch_size = {plan.truncated_batch_size} is not accounted for; train without it")
    earlier = hasattr(plan, "partition_type")  # a plan of release 2.0 or earlier has this field
    equal = plan.partition_type.name == "EQUAL_SPLIT" if earlier else plan.num_examples is not None
    if equal and relation not in ("zero_out", "replace_one"):
        raise InputError(f"relation = {relation!r} moves records of an equal split; read and ask for 'zero_out'")
    noise = check_one("noise_multiplier", plan.noise_multiplier, POSITIVE, "a plan is for one run")
    column, n = np.ravel(check("strategy", plan.strategy, REAL)), int(plan.iterations)
    norm, sampled = float(np.linalg.norm(column)), CyclicPoisson(column.size, plan.sampling_prob)
    if not plan.column_normalize:
        return MatrixMechanism(Banded(column.size, n, coefficients=tuple(column / norm)), noise, sampled)
    norms = np.sqrt(np.cumsum(np.pad(np.square(column), (0, n - column.size)))[::-1])
    return MatrixMechanism(ColumnNormalised(column.size, n, diagonals=column[:, None] / norms), noise * norm, sampled)


def to_jax_privacy(thing: Strategy | MatrixMechanism) -> Foreign:
    """Convert a strategy or mechanism to an object that `from_jax_privacy` reads.

    Banded and Toeplitz become arrays of coefficients. Only the other conversions need jax_privacy to be installed.

    Parameters
    ----------
    thing : BLT, ColumnNormalised, Banded, Toeplitz, or a MatrixMechanism of Banded or Toeplitz with CyclicPoisson

    Returns
    -------
    object of jax_privacy, or array of coefficients
        A MatrixMechanism becomes an execution plan, whose guarantee is for "add_or_remove_one". Its coefficients are
        padded with zeros to the number of groups, and its noise is rounded up.

    >>> to_jax_privacy(Toeplitz((1.0, 0.5), steps=4)).tolist()
    [1.0, 0.5]
    """
    match thing:
        case Banded() | Toeplitz():
            return thing.column
        case BLT():
            theirs = optional_package("jax_privacy.matrix_factorization.buffered_toeplitz", "a BufferedToeplitz")
            return theirs.BufferedToeplitz(buf_decay=np.array(thing.decays), output_scale=np.array(thing.scales))
        case ColumnNormalised():
            theirs = optional_package("jax_privacy.matrix_factorization.banded", "a ColumnNormalizedBanded")
            return theirs.ColumnNormalizedBanded(params=thing.entries.T)
        case MatrixMechanism(Banded() | Toeplitz() as strategy, noise, CyclicPoisson(groups, rate)):
            theirs = optional_package("jax_privacy.experimental.execution_plan", "an execution plan")
            column = np.pad(strategy.column, (0, groups - strategy.overlap))
            noise = check_one("noise_multiplier", noise, POSITIVE, "a plan is for one run") * (1.0 + 8.0 * ROUNDOFF)
            given = {"noise_multiplier": noise / float(np.linalg.norm(column)), "sampling_prob": rate}
            return theirs.BandMFExecutionPlanConfig(iterations=strategy.steps, strategy=column, **given)
    raise InputError(f"{type(thing).__name__} has no counterpart in jax_privacy; train it with jaxacct")
