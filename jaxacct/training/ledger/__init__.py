"""Ledgers: their lines (`format`), what these add up to and what may be claimed (`contents`), the file (`ledger`)."""

from jaxacct.training.ledger.ledger import Ledger, Mark

__all__ = ["Ledger", "Mark"]
