"""Interop: mechanisms as JSON, and to and from the other libraries of the field.

What needs another library imports it when first used.
"""

import importlib
from typing import Any

from jaxacct.interop.documents import from_json, to_json

_HOMES = {
    "CertifiedAccountant": "accountant",
    "OpacusAccountant": "opacus_accountant",
    "from_dp_event": "dp_events",
    "register_opacus": "opacus_accountant",
    "supports": "dp_events",
    "to_dp_event": "dp_events",
}
__all__ = [
    "CertifiedAccountant",
    "OpacusAccountant",
    "from_dp_event",
    "from_json",
    "register_opacus",
    "supports",
    "to_dp_event",
    "to_json",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxacct.interop' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"jaxacct.interop.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise ModuleNotFoundError(
            f"jaxacct.interop.{name} needs the package {package}; pip install it", name=error.name
        ) from None
