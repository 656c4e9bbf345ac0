"""The contour integral: one core, and a file for each law.  Here are the kernels that users may call inside jit."""

from jaxacct.kernels.contour.plain import Bracketed, delta, delta_about, delta_along, epsilon

__all__ = ["Bracketed", "delta", "delta_about", "delta_along", "epsilon"]
