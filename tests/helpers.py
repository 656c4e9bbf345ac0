"""What several test files need."""

from collections.abc import Callable
from typing import Any

import pytest

from jaxacct.validation import InputError


def refusal(call: Callable[..., Any], *args: Any, error: type[Exception] = InputError, **kwargs: Any) -> str:
    """The message of the refusal, which must be one line."""
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message
