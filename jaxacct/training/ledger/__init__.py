"""Ledgers: format (`format`), what entries add up to (`totals`), what may be claimed (`claim`), the file itself."""

from jaxacct.training.ledger.ledger import Ledger, Mark

__all__ = ["Ledger", "Mark"]
