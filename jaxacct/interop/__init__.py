"""Mechanisms as JSON, and as objects of dp_accounting, jax_privacy and Opacus, which are imported at first use."""

from typing import TYPE_CHECKING

from jaxacct.core.lazy_exports import lazy_exports
from jaxacct.interop.documents import from_json, to_json

if TYPE_CHECKING:
    from jaxacct.interop.accountant import CertifiedAccountant
    from jaxacct.interop.dp_accounting_pld import to_dp_accounting_pld
    from jaxacct.interop.dp_events import from_dp_event, supports, to_dp_event
    from jaxacct.interop.jax_privacy_plans import from_jax_privacy, to_jax_privacy
    from jaxacct.interop.opacus_accountant import OpacusAccountant, register_opacus

__all__ = [
    "CertifiedAccountant",
    "OpacusAccountant",
    "from_dp_event",
    "from_jax_privacy",
    "from_json",
    "register_opacus",
    "supports",
    "to_dp_accounting_pld",
    "to_dp_event",
    "to_jax_privacy",
    "to_json",
]

_HOMES = {
    "CertifiedAccountant": "accountant",
    "to_dp_accounting_pld": "dp_accounting_pld",
    **dict.fromkeys(("from_dp_event", "supports", "to_dp_event"), "dp_events"),
    **dict.fromkeys(("from_jax_privacy", "to_jax_privacy"), "jax_privacy_plans"),
    **dict.fromkeys(("OpacusAccountant", "register_opacus"), "opacus_accountant"),
}
if not TYPE_CHECKING:  # type checkers must not see `__getattr__`: they would accept every misspelt name
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES, "from_json", "to_json")
