"""A mechanism as a PrivacyLossDistribution of dp_accounting (needs the dp_accounting package)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from dp_accounting.pld import pld_pmf, privacy_loss_distribution
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from jaxacct.accounting.dispatch import answered_by_parts
from jaxacct.core.validation import POSITIVE, RELATIONS, InputError, check_flag, check_one, choice, refuse_tracers
from jaxacct.mechanisms import DIRECTIONS, Mechanism, batch_shape
from jaxacct.mechanisms.base import ConcentratedPart, FinitePart, GaussianPart, Part
from jaxacct.mechanisms.combinators import in_either_order
from jaxacct.mechanisms.concentrated import concentrated_pair
from jaxacct.mechanisms.finite import sample_pair

LONGEST_LOSS = 2**24
"""Largest number of intervals between 0 and any finite loss. With more, the distribution would not fit in memory."""


def to_dp_accounting_pld(
    mechanism: Mechanism,
    relation: str = "add_or_remove_one",
    *,
    value_discretization_interval: float = 1e-4,
    pessimistic: bool = True,
) -> PrivacyLossDistribution:
    """Return a mechanism's privacy loss distribution as dp_accounting's object, which can compose it further.

    dp_accounting composes one distribution for each part, and makes the distributions of Gaussian and Laplace parts.
    The losses of finite parts are rounded here to whole intervals. In both directions the pessimistic distribution
    dominates the mechanism, and the mechanism dominates the optimistic one, up to rounding errors of dp_accounting.
    These errors have no known bound, so the distribution is no certificate.

    Parameters
    ----------
    mechanism : Mechanism
        One configuration.
    relation : {"add_or_remove_one", "replace_one", "zero_out"}
    value_discretization_interval : float > 0
        The length h of an interval of losses. Rounding adds at most about n h to the epsilon of n steps.
    pessimistic : bool
        True rounds losses up, so deltas are upper bounds. False rounds losses down, so deltas are lower bounds.

    Returns
    -------
    dp_accounting.pld.privacy_loss_distribution.PrivacyLossDistribution

    Raises
    ------
    InputError
        If the mechanism is a batch; if the relation has one direction, or the mechanism refuses it; if the interval is
        too short; or if `pessimistic` is False, but the library has only an upper bound of the mechanism.

    References
    ----------
    Doroshenko et al. (2022), Connect the Dots: Tighter Discrete Approximations of Privacy Loss Distributions.

    >>> import jaxacct as ja
    >>> pair = [to_dp_accounting_pld(ja.Laplace(2.0), pessimistic=kind) for kind in (False, True)]
    >>> low, high = (float(law.get_delta_for_epsilon(0.2)) for law in pair)
    >>> low <= float(ja.delta(ja.Laplace(2.0), 0.2).estimate) <= high * (1 + 1e-9), high < 1.001 * low
    (True, True)
    """
    refuse_tracers("interop.to_dp_accounting_pld", "the mechanism outside jit", mechanism=mechanism)
    if batch_shape(mechanism):
        raise InputError(f"a batch of shape {batch_shape(mechanism)} is not one distribution; convert one at a time")
    choice("relation", relation, tuple(name for name in RELATIONS if name not in ("add_one", "remove_one")))
    check_flag("pessimistic", pessimistic, "True rounds losses up")
    step = check_one("value_discretization_interval", value_discretization_interval, POSITIVE, "give one interval")
    known = mechanism.validated()
    if not pessimistic and not _has_lower_pair(known, relation):
        raise InputError(
            f"pessimistic = False is not supported for {type(mechanism).__name__} under {relation!r}: its pair "
            "bounds it from above only; use pessimistic=True"
        )
    expand = known.expand if pessimistic else known.expand_below
    ahead, back = (expand(relation, way) for way in DIRECTIONS)
    if pessimistic and relation == "replace_one" and not known.symmetric():
        # composed further, a step may have either order, as outputs choose: its pair is the symmetric one for both
        ahead = in_either_order(known, relation)
        back = [one if isinstance(one[0], FinitePart) else two for one, two in zip(ahead, back, strict=True)]
    total = privacy_loss_distribution.identity(step, pessimistic)
    for (forward, count), (reverse, _) in zip(ahead, back, strict=True):
        law = _law(forward, reverse, step, pessimistic)
        if law is not None:
            total = total.compose(law if count == 1.0 else law.self_compose(int(count)))
    return total


def _has_lower_pair(mechanism: Mechanism, relation: str) -> bool:
    """Return whether the parts from `expand_below` give lower bounds: the mechanism must be known to dominate them."""
    if mechanism.has_bracket():
        return mechanism.kind_of_bracket(relation) == "certified"
    return mechanism.kind_under(relation) == "certified" and answered_by_parts(mechanism, relation)


def _law(forward: Part, reverse: Part, step: float, pessimistic: bool) -> PrivacyLossDistribution | None:
    """Return the distribution of one part, given in both directions; None if the part reveals nothing."""
    if isinstance(forward, ConcentratedPart):
        pair = concentrated_pair(forward.rho, forward.xi)
        forward, reverse = (sample_pair(pair, np.asarray(1.0), way) for way in DIRECTIONS)
    if isinstance(forward, FinitePart) and isinstance(reverse, FinitePart):
        return PrivacyLossDistribution(_rounded(forward, step, pessimistic), _rounded(reverse, step, pessimistic))
    if isinstance(forward, FinitePart):
        raise TypeError("a part is finite in one direction only")
    if float(forward.rate) == 0.0:
        return None
    settings: dict[str, Any] = {
        "pessimistic_estimate": pessimistic,
        "use_connect_dots": pessimistic,  # connect-the-dots exists only as a pessimistic method
        "value_discretization_interval": step,
        "sampling_prob": float(forward.rate),
    }
    if isinstance(forward, GaussianPart):
        return privacy_loss_distribution.from_gaussian_mechanism(float(forward.sigma), **settings)
    return privacy_loss_distribution.from_laplace_mechanism(float(forward.scale), **settings)


def _rounded(part: FinitePart, step: float, pessimistic: bool) -> pld_pmf.PLDPmf:
    """Round the losses of a finite law to whole multiples of `step`: up if `pessimistic`, else down."""
    present = part.mass > 0.0
    loss, mass = part.loss[present], part.mass[present]
    place = loss / step
    if place.size and np.abs(place).max() > LONGEST_LOSS:
        raise InputError(
            f"value_discretization_interval = {step!r} is too short for losses up to {np.abs(loss).max():.3g}; "
            f"use {np.abs(loss).max() / LONGEST_LOSS:.1g} or more"
        )
    # `beyond` exceeds the rounding errors of `loss` and `place`, so no loss is rounded the wrong way.
    beyond = 1e-15 * np.abs(place)
    keys = np.ceil(place + beyond) if pessimistic else np.floor(place - beyond)
    masses = {int(key): math.fsum(mass[keys == key]) for key in np.unique(keys)}
    return pld_pmf.create_pmf(masses, step, float(part.infinity), pessimistic)
