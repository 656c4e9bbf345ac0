"""Ledgers record what runs release.

`format` reads and writes their lines, `contents` adds them up and makes claims, and `ledger` keeps the file.
"""

from jaxacct.training.ledger.ledger import Ledger, Mark

__all__ = ["Ledger", "Mark"]
