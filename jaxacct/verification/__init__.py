"""Verification: a second program, in ball arithmetic, that shares no code with the engines."""

from jaxacct.lazy import names

_HOMES = {"Verification": "result", "verify": "bracket_check"}
__all__ = sorted(_HOMES)
__getattr__, __dir__ = names(__name__, _HOMES)
