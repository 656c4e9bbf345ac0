"""Interop: mechanisms as JSON, and to and from the other libraries of the field.

What needs another library imports it when first used.
"""

from jaxacct.interop.documents import from_json, to_json
from jaxacct.lazy import names

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
__getattr__, __dir__ = names(__name__, _HOMES, "from_json", "to_json")
