"""Interop: mechanisms as JSON."""

from jaxacct.interop.documents import from_json, to_json

__all__ = ["from_json", "to_json"]
