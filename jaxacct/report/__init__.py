"""Reports: one page on a privacy claim, for the person who must sign it (README.md of this folder)."""

from typing import TYPE_CHECKING

from jaxacct.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxacct.report.claim import Claim
    from jaxacct.report.making import Report, report

__all__ = ["Claim", "Report", "report"]

_HOMES = {"Claim": "claim", "Report": "making", "report": "making"}
if not TYPE_CHECKING:  # hidden from type checkers, which would accept every misspelt name
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
