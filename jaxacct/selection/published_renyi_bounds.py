"""Rényi bounds of a selection for the truncated negative binomial and the Poisson law [Papernot and Steinke 2022].

The auxiliary guarantee comes from the reverse direction of the one that is bounded, where the two differ (README.md of
this folder, "Which direction").  The Poisson bound keeps K = 0, without which the published one is false for mean < 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxacct.core.validation import InputError
from jaxacct.mechanisms import Mechanism, batch_shape
from jaxacct.representations.renyi_conversions import delta_from_renyi, epsilon_from_renyi
from jaxacct.representations.renyi_divergences import renyi_divergence
from jaxacct.selection.base_profile import Sides, common_shape, sides, upper_delta
from jaxacct.selection.gaussian_envelope import mus
from jaxacct.selection.law_families import Law, Poisson, TruncatedNegativeBinomial

__all__ = ["LAWS", "RENYI_ORDERS", "curve", "delta", "epsilon"]

LAWS = (TruncatedNegativeBinomial, Poisson)
"""Laws of K for which such a theorem is published."""
RENYI_ORDERS = 1.0 + np.geomspace(1e-2, 1e4, 241)
"""Orders that are tried, 40 for each power of ten of `order - 1`.  Any order gives a true bound."""
ROUNDED_UP = 1.0 + 1e-12
"""A factor larger than the rounding of any of these formulas, by which their values are rounded up."""


def epsilon(run: Mechanism, law: Law, delta: np.ndarray, relation: str) -> np.ndarray:
    """eps for which the selection is (eps, delta)-DP, through the best order of its Rényi curve; kind "bound"."""
    return _converted(run, law, "delta", delta, relation, epsilon_from_renyi)


def delta(run: Mechanism, law: Law, epsilon: np.ndarray, relation: str) -> np.ndarray:
    """Upper bounds of delta(eps), eps >= 0, of the selection, likewise."""
    return _converted(run, law, "epsilon", epsilon, relation, delta_from_renyi)


def _converted(
    run: Mechanism, law: Law, name: str, given: np.ndarray, relation: str, convert: Callable[..., Any]
) -> np.ndarray:
    """The larger of both directions."""
    shape, value = common_shape(run, law, name, given), np.zeros(())
    for side in sides(run, relation):
        values = _full(curve(run, law, RENYI_ORDERS, side), shape)
        value = np.maximum(value, np.asarray(convert(RENYI_ORDERS, values, np.broadcast_to(given, shape)).upper))
    return value


def curve(run: Mechanism, law: Law, orders: np.ndarray, side: Sides) -> np.ndarray:
    """Upper bounds of the selection's Rényi divergences in one direction, (O, *batch); orders (O,) > 1.

    Truncated negative binomial, with R the divergences of the base:
    `R(a) + (1+eta) min_b ((1 - 1/b) R_rev(b) + log(1/gamma)/b) + log(m)/(a-1)`.
    Poisson, with e^{eps_1} = 1 + 1/(a-1): `log(e^-m + m e^{(a-1)(R(a) + m delta_rev(eps_1))})/(a-1)`.
    """
    shape = np.broadcast_shapes(batch_shape(run), law.shape)
    along = orders.reshape(-1, *(1,) * len(shape))
    base = _renyi(run, along, side.forward)
    if isinstance(law, TruncatedNegativeBinomial):
        spread = (1.0 - 1.0 / along) * _renyi(run, along, side.reverse) - np.log(law.gamma) / along
        value = base + (1.0 + np.asarray(law.eta)) * np.min(spread, axis=0) + np.log(law.mean) / (along - 1.0)
    elif isinstance(law, Poisson):
        missed = _missed(run, np.log1p(1.0 / (along - 1.0)), side.reverse)
        grown = np.log(law.mean) + (along - 1.0) * (base + law.mean * missed)
        value = np.logaddexp(-np.asarray(law.mean), grown) / (along - 1.0)
    else:
        names = ", ".join(kind.__name__ for kind in LAWS)
        raise InputError(f"no Rényi bound is published for k = {type(law).__name__}; use {names}, or bound='envelope'")
    return np.maximum(value, 0.0) * ROUNDED_UP


def _missed(run: Mechanism, at: np.ndarray, relation: str) -> np.ndarray:
    """Upper ends of delta(eps) of the base: of Gaussians by the formula itself, without asking for engines."""
    from jaxacct.engines import closed_form

    mu = mus(run)
    if mu is None:
        return upper_delta(run, at, relation)
    return closed_form.delta(mu.reshape(batch_shape(run)), at).upper


def _renyi(run: Mechanism, orders: np.ndarray, relation: str) -> np.ndarray:
    return np.asarray(renyi_divergence(run, orders, relation).upper)


def _full(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Values (O, *batch) with the batch broadcast to its common shape."""
    missing = len(shape) - (values.ndim - 1)
    values = values.reshape(values.shape[:1] + (1,) * missing + values.shape[1:])
    return np.broadcast_to(values, values.shape[:1] + shape)
