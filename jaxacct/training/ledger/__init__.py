"""Ledgers: their lines (`format`), the totals and claims that follow (`contents`), and the file (`ledger`)."""

from jaxacct.training.ledger.ledger import Ledger, Mark

__all__ = ["Ledger", "Mark"]
