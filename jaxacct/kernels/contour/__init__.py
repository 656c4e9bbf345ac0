"""Computes delta and epsilon by contour integrals: `core.py` is for all laws, and every kind of law has its own files.

Users may call the kernels exported here inside jit.
"""

from jaxacct.kernels.contour.plain import Bracketed, delta, delta_about, delta_along, epsilon

__all__ = ["Bracketed", "delta", "delta_about", "delta_along", "epsilon"]
