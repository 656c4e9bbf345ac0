"""Verification: a second program, which checks brackets in ball arithmetic. It shares no code with the engines."""

from typing import TYPE_CHECKING

from jaxacct.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxacct.verification.bracket_check import Verification, verify

__all__ = ["Verification", "verify"]

_HOMES = dict.fromkeys(__all__, "bracket_check")
if not TYPE_CHECKING:  # a type checker that sees `__getattr__` would accept every misspelt name
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
