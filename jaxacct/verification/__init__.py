"""Verification: a second program, in ball arithmetic, that shares no code with the engines."""

from jaxacct.lazy import names

_HOMES = {"Verification": "record", "verify": "verdict"}
__all__ = sorted(_HOMES)
__getattr__, __dir__ = names(__name__, _HOMES)
