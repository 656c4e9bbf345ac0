"""What every tuning shares: keys from one secret root, the winner's rank, and the one entry in a ledger."""

from __future__ import annotations

import hmac
import math
import os
import secrets
from typing import Any

from jaxacct.mechanisms import Mechanism
from jaxacct.training.chacha import key_from_bytes
from jaxacct.training.ledger import Ledger
from jaxacct.training.plan import Plan
from jaxacct.validation import InputError

__all__ = ["Secret", "note_whole", "rank"]


class Secret:
    """All keys of a tuning, from 32 secret bytes, by default the operating system's."""

    def __init__(self, root: bytes | None) -> None:
        if root is not None and (not isinstance(root, bytes) or len(root) != 32):
            raise InputError("key must be 32 bytes; leave it out, or use secrets.token_bytes(32)")
        self._root = secrets.token_bytes(32) if root is None else root

    def root(self, purpose: bytes, number: int = 0) -> bytes:
        """32 bytes for one purpose and candidate."""
        return hmac.digest(self._root, purpose + number.to_bytes(8, "little"), "sha256")

    def key(self, purpose: bytes, number: int = 0) -> Any:
        """The same as a key of ChaCha20."""
        return key_from_bytes(self.root(purpose, number))


def rank(score: float, number: int) -> tuple[float, int]:
    """One order for every K: the larger score, NaN below every number; of equals the candidate drawn first.

    >>> max(rank(0.5, 0), rank(0.5, 1), rank(math.nan, 2))
    (0.5, 0)
    """
    return (-math.inf if math.isnan(score) else score, -number)


def note_whole(ledger: Ledger | str | os.PathLike[str] | None, plan: Plan, mechanism: Mechanism, note: str) -> None:
    """Note a whole tuning, in an open ledger or at a path; it is on the disk when this returns."""
    if ledger is None:
        return
    if isinstance(ledger, Ledger):
        ledger.spend(mechanism, note)
        return
    with Ledger.open(ledger) if os.path.exists(ledger) else Ledger.create(ledger, plan) as opened:
        opened.spend(mechanism, note)
