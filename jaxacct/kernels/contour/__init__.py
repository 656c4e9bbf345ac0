"""The contour integral: one core, and files for each law.  Users may call the kernels exported here inside jit."""

from jaxacct.kernels.contour.plain import Bracketed, delta, delta_about, delta_along, epsilon

__all__ = ["Bracketed", "delta", "delta_about", "delta_along", "epsilon"]
