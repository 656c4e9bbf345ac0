"""Reports: one page on a privacy claim, for the person who must sign it (README.md of this folder)."""

from typing import TYPE_CHECKING

from jaxacct.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxacct.report.claim import Claim
    from jaxacct.report.making import Report, report

__all__ = ["Claim", "Report", "report"]

_HOMES = {"Claim": "claim", "Report": "making", "report": "making"}
if not TYPE_CHECKING:  # a type checker that sees `__getattr__` would accept every misspelt name
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
