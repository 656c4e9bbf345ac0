"""What every tuning shares: keys from one secret root, and the one entry in a ledger."""

from __future__ import annotations

import hmac
import os
import secrets
from collections import Counter
from typing import Any

from jaxacct.core.chacha import key_from_bytes
from jaxacct.core.validation import InputError
from jaxacct.mechanisms import Mechanism
from jaxacct.training.ledger import Ledger
from jaxacct.training.ledger.contents import Spent, claim
from jaxacct.training.ledger.format import Run
from jaxacct.training.plan import Plan

__all__ = ["Secret", "note_whole"]


class Secret:
    """All keys of a tuning, from 32 secret bytes, by default the operating system's."""

    def __init__(self, root: bytes | None) -> None:
        if root is not None and (not isinstance(root, bytes) or len(root) != 32):
            raise InputError("key must be 32 bytes; leave it out, or use secrets.token_bytes(32)")
        self._root = secrets.token_bytes(32) if root is None else root

    def root(self, purpose: bytes, number: int = 0) -> bytes:
        """32 bytes for one purpose and candidate."""
        return hmac.digest(self._root, purpose + number.to_bytes(8, "little"), "sha256")

    def choice(self, purpose: bytes, number: int, size: int) -> int:
        """A whole number below `size`, all equally likely."""
        return int.from_bytes(self.root(purpose, number)[:16], "little") * size >> 128

    def key(self, purpose: bytes, number: int = 0) -> Any:
        """The same as a key of ChaCha20."""
        return key_from_bytes(self.root(purpose, number))


def note_whole(
    ledger: Ledger | str | os.PathLike[str] | None,
    plan: Plan,
    mechanism: Mechanism,
    note: str,
    target: float | None,
) -> None:
    """Note a whole tuning, in an open ledger or at a path; it is on the disk when this returns.

    Refused, and nothing written, where it would cost more than the target together with what the ledger holds already.
    """
    if ledger is None:
        return
    if isinstance(ledger, Ledger):
        _require_room(ledger, plan, mechanism, target)
        ledger.spend(mechanism, note)
        return
    if not os.path.exists(ledger):
        with Ledger.create(ledger, plan) as opened:
            opened.spend(mechanism, note)
        return
    with Ledger.open(ledger) as opened:
        _require_room(opened, plan, mechanism, target)
        opened.spend(mechanism, note)


def _require_room(ledger: Ledger, plan: Plan, mechanism: Mechanism, target: float | None) -> None:
    """InputError where a ledger's releases and one more exceed a target."""
    several = [(ledger.counting(name), headers) for name, headers in ledger.headers.items()]
    if target is None or not any(spent.releases or spent.others for spent, _ in several):
        return
    several.append((Spent(others=Counter([mechanism])), [Run("", "", plan)]))
    upper = float(claim(several, plan.target_delta, plan.relation).upper)
    if not upper <= target:
        raise InputError(
            f"ledger holds releases already: with this tuning they would cost epsilon {upper:.6g}, above the plan's "
            f"target {target:.6g}; use a ledger of its own if the data are others, or plan for what is left"
        )
