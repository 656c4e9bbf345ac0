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
