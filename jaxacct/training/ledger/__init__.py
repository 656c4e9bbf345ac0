"""Ledgers record what runs release.

`format` reads and writes the lines of a ledger.  `contents` adds up the releases in the lines and bounds their epsilon.
`ledger` keeps the file.
"""

from jaxacct.training.ledger.ledger import Ledger, Mark

__all__ = ["Ledger", "Mark"]
