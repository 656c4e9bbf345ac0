"""What several test files need."""

import doctest
import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from hypothesis import strategies as st

import jaxacct as ja
from jaxacct.core.validation import InputError


def refusal(call: Callable[..., Any], *args: Any, error: type[Exception] = InputError, **kwargs: Any) -> str:
    """The message of the refusal, which must be one line."""
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def doctests_of(module: ModuleType) -> int:
    """How many doctests a module has; pytest runs them, module by module (`--doctest-modules`)."""
    return sum(len(found.examples) for found in doctest.DocTestFinder().find(module))


def compositions(steps: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Mechanisms that repeat and compose those drawn from ``steps``, a few deep."""
    return st.recursive(
        steps,
        lambda inner: (
            st.builds(ja.repeat, inner, st.integers(1, 2**53))
            | st.lists(inner, min_size=1, max_size=3).map(lambda m: ja.compose(*m))
        ),
        max_leaves=6,
    )


def integral(function: Callable[[Any, bool], Any], *points: float) -> Any:
    """A ball of Arb that holds the integral of an analytic function from each point to the next.

    ``function(u, analytic)`` passes ``analytic`` to the logarithms and roots that it takes.
    """
    acb = pytest.importorskip("flint").acb
    return sum((acb.integral(function, *ends) for ends in itertools.pairwise(points)), acb(0))


def gaussian_moment(sigma: float, q: float, power: complex) -> Any:
    """A ball that holds the mean of mix^power over a standard normal u.

    ``mix`` is ``1 - q + q e^y`` with ``y = u/sigma - 1/(2 sigma^2)``.
    """
    flint = pytest.importorskip("flint")
    low, high = -20 - abs(min(power.real, 0)) * q / sigma, max(power.real, 1) / sigma + 25

    def inside(u: Any, analytic: bool) -> Any:
        mix = 1 - flint.arb(q) + flint.arb(q) * (u / sigma - 0.5 / (flint.arb(sigma) * sigma)).exp()
        return (mix.log(analytic=analytic) * flint.acb(power) - u * u / 2).exp()

    return integral(inside, low, high) / (2 * flint.arb.pi()).sqrt()
