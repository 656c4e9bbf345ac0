"""Checks whether NumPy's elementary functions, on the machine of this process, keep to the error model of arrays.py.

NumPy takes them from the C library or from loops for vector units, so their errors differ between machines, and between
contiguous and strided arrays. The check takes seven hundred points where values are hard to round or a range ends.
`python tests/elementary_points.py` computed the correctly rounded values in elementary_table.txt by mpmath.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from jaxacct.core.floats import ROUNDOFF
from jaxacct.kernels.arrays import COMPOUND_UNITS, SIMPLE_UNITS, erfc
from jaxacct.kernels.lattice_laws import FFT_CONSTANT

TABLE = pathlib.Path(__file__).with_name("elementary_table.txt")
"""The file of correct values. A line has a function's name, one or two arguments, and the value, as hexadecimals."""
VALUES: dict[str, tuple[Callable[..., np.ndarray], float]] = {
    "sqrt": (np.sqrt, 1.0),
    "exp": (np.exp, SIMPLE_UNITS),
    "log": (np.log, SIMPLE_UNITS),
    "sin": (np.sin, SIMPLE_UNITS),
    "cos": (np.cos, SIMPLE_UNITS),
    "arctan2": (np.arctan2, SIMPLE_UNITS),
    "log1p": (np.log1p, COMPOUND_UNITS),
    "expm1": (np.expm1, COMPOUND_UNITS),
    "hypot": (np.hypot, COMPOUND_UNITS),
    "modulus": (lambda y, x: np.abs(x + 1j * y), COMPOUND_UNITS),
    "logaddexp": (np.logaddexp, COMPOUND_UNITS),
    "erfc": (lambda x: erfc(np, x), SIMPLE_UNITS),
}
"""Maps a name to (function as kernels call it, allowed error in units of 2^-53). `units_of` raises two of these."""
ROTATION = 4096
"""Length of the FFT that is checked."""


def units_of(name: str, arguments: list[np.ndarray], value: np.ndarray) -> np.ndarray:
    """Return the error that the model allows a function at each argument, in units of 2^-53 times the value there."""
    units = np.full(value.shape, VALUES[name][1])
    if name == "erfc":
        units *= 4.0 + np.square(arguments[0])
    if name == "logaddexp":
        # The sum max(x, y) + log1p(e^-|x - y|) may cancel. So an error relative to max(|x|, |y|) is allowed as well.
        units *= 1.0 + 2.0 * np.maximum(*np.abs(arguments)) / np.maximum(np.abs(value), 1e-300)
    return units


@functools.cache
def failure(special: bool = False) -> str | None:
    """Return which of NumPy's functions is inaccurate here, or None. `special`: try erfc too, which imports SciPy."""
    for name, (function, _) in VALUES.items():
        if special == (name == "erfc") and _is_inaccurate(name, function):
            return f"NumPy's {name} is less accurate than certificates assume"
    if special:
        return failure()
    tiny = np.full(9, ROUNDOFF)
    if np.any(1.0 + tiny != 1.0) or np.any(1.0 + 1.5 * tiny == 1.0) or np.any(-1.0 - tiny != -1.0):
        return "sums are not rounded to nearest"
    impulse = np.eye(1, ROTATION, 1)[0]
    transform = np.fft.rfft(impulse)
    angle = 2.0 * np.pi / ROTATION * np.arange(transform.size)
    # The three terms bound three errors: of the FFT, of the angle (which is at most pi), and of cosine and sine.
    allowed = ROUNDOFF * (FFT_CONSTANT * np.log2(ROTATION) + 4.0 * np.pi + 8.0)
    wrong = np.abs(transform - (np.cos(angle) - 1j * np.sin(angle)))
    if not (np.all(wrong <= allowed) and np.all(np.abs(np.fft.irfft(transform, n=ROTATION) - impulse) <= allowed)):
        return "NumPy's fft is less accurate than certificates assume"
    return None


@functools.cache
def _table() -> dict[str, np.ndarray]:
    """Map each function's name to an array with a row for each point: the arguments, then the function's value."""
    rows: dict[str, list[list[float]]] = {}
    for line in TABLE.read_text(encoding="ascii").splitlines():
        name, *numbers = line.split()
        rows.setdefault(name, []).append([float.fromhex(x) for x in numbers])
    return {name: np.array(some) for name, some in rows.items()}


def _is_inaccurate(name: str, function: Callable[..., np.ndarray]) -> bool:
    """Return whether a value is off by more than the model allows minus 2^-53, the relative error of the table."""
    *arguments, value = _table()[name].T
    with np.errstate(all="ignore"):
        allowed = np.maximum(units_of(name, arguments, value) - 1.0, 1.0) * ROUNDOFF * np.abs(value)
        found = list(_in_several_layouts(function, arguments))
    return not all(np.all(np.abs(x - value) <= allowed) for x in found)


def _in_several_layouts(function: Callable[..., np.ndarray], arguments: list[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the function's values at arguments in several layouts. NumPy runs a different loop for each layout."""
    yield function(*(np.ascontiguousarray(x) for x in arguments))
    yield function(*(x[::-1].copy()[::-1] for x in arguments))
    yield function(*(np.repeat(x, 3)[::3] for x in arguments))
    cuts = [0, 1, 3, 6, 11, 18, 29, len(arguments[0])]
    yield np.concatenate([function(*(x[a:b] for x in arguments)) for a, b in pairwise(cuts)])
