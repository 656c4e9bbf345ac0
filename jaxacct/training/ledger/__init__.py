"""Ledgers record what runs release (README.md of this folder)."""

from jaxacct.training.ledger.ledger import Ledger, Mark

__all__ = ["Ledger", "Mark"]
