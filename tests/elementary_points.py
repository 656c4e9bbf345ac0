"""Arguments at which elementary functions are tried, and their values by mpmath.

Run as a program it writes jaxacct/kernels/elementary_table.txt.
"""

import math

import mpmath
import numpy as np

from jaxacct.kernels.arrays import LARGEST_ANGLE
from jaxacct.kernels.elementary_check import TABLE

EXACTLY = {
    "sqrt": mpmath.sqrt,
    "exp": mpmath.exp,
    "log": mpmath.log,
    "sin": mpmath.sin,
    "cos": mpmath.cos,
    "arctan2": mpmath.atan2,
    "log1p": mpmath.log1p,
    "expm1": mpmath.expm1,
    "hypot": mpmath.hypot,
    "modulus": mpmath.hypot,
    "logaddexp": lambda a, b: max(a, b) + mpmath.log1p(mpmath.exp(min(a, b) - max(a, b))),
    "erfc": mpmath.erfc,
}
WORST = {  # where a library, with or without vector units, erred most among 500,000 arguments
    "exp": ["-0x1.db6d98eee180ap+7", "0x1.370d1258208b4p+3", "0x1.3140b833d6170p+5", "0x1.91c03147a05cfp-18"],
    "log": ["0x1.fdf4b03996520p-1", "0x1.effa28af60ec0p-1", "0x1.f02ecadfc0bbep-1", "0x1.222bb83f53718p+0"],
    "sin": ["-0x1.71c36e250dfe0p+1", "0x1.81b36ab44dc48p+1", "-0x1.0212e15fb71c0p-3", "0x1.a26f6b3d5daa0p+2"],
    "log1p": ["-0x1.fc46c68be0b3bp-7", "-0x1.fc4c350a97171p-6", "0x1.cd8d7179a1aa0p+0", "0x1.bc6221cb078cap+0"],
    "expm1": ["0x1.be6c3ad391110p+6", "-0x1.639cc2129d238p-1", "0x1.1a83a95d14a60p+0", "0x1.1a5d84c607228p+0"],
    "erfc": ["0x1.fe24bb1834aefp-1", "0x1.f21a92e7944a0p-1", "0x1.e75264c34ec7dp-1", "0x1.140a1089f4192p+1"],
}


def arguments_of(name: str, size: int, seed: int) -> list[np.ndarray]:
    """3 to 4 times `size` arguments that cover the function's use, with more of them where the function is hard."""
    rng = np.random.default_rng([seed, sum(map(ord, name))])

    def wide(low: float, high: float) -> np.ndarray:
        return 10.0 ** rng.uniform(low, high, size) * rng.choice([-1.0, 1.0], size)

    positive = [np.abs(wide(-307.6, 308.2)), 1.0 + wide(-15.9, -0.3), rng.uniform(0.3, 3.0, size)]
    most = int(LARGEST_ANGLE / (0.5 * math.pi))
    multiples = np.concatenate([rng.integers(1, most, size), np.arange(1, size // 4)]) * (0.5 * math.pi)
    turns = [rng.uniform(-7.0, 7.0, size), wide(-300.0, math.log10(LARGEST_ANGLE)), multiples]
    pairs = [wide(-150.0, 150.0), wide(-3.0, 3.0), rng.normal(size=size), wide(-0.1, 0.1)]
    one: dict[str, list[np.ndarray]] = {
        "sqrt": positive,
        "log": [*positive, 2.0 ** rng.integers(-1020, 1020, size) * (1.0 + wide(-15.9, -3.0))],
        "exp": [rng.uniform(-708.3, 709.7, size), rng.uniform(-40.0, 40.0, size), wide(-20.0, 0.0)],
        "sin": turns,
        "cos": turns,
        "expm1": [rng.uniform(-745.0, 709.7, size), rng.uniform(-3.0, 3.0, size), wide(-300.0, 1.5)],
        "log1p": [positive[0], -1.0 + np.abs(wide(-15.0, -0.3)), wide(-300.0, -0.01), rng.uniform(-0.6, 2.0, size)],
        "erfc": [rng.uniform(-6.0, 26.5, size), wide(-20.0, 0.0), rng.uniform(0.4, 1.3, size)],
    }
    if name in one:
        hard = [float.fromhex(x) for x in WORST.get(name, [])]
        return [np.concatenate([hard, *one[name]])]
    if name == "logaddexp":
        far = rng.uniform(-40.0, 40.0, 4 * size)
        near = far[: 2 * size] + rng.uniform(-40.0, 40.0, 2 * size)
        return [far, np.concatenate([near, rng.uniform(-700.0, 700.0, 2 * size)])]
    return [np.concatenate([rng.permutation(x) for x in pairs]) for _ in range(2)]


def exactly(name: str, arguments: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The correctly rounded values, and the exact values minus these."""
    high, low = np.zeros(arguments[0].size), np.zeros(arguments[0].size)
    with mpmath.workprec(160):
        for i, x in enumerate(zip(*arguments, strict=True)):
            value = EXACTLY[name](*(mpmath.mpf(float(a)) for a in x))
            high[i] = float(value)
            low[i] = float(value - mpmath.mpf(high[i]))
    return high, low


if __name__ == "__main__":
    lines = []
    for name in EXACTLY:
        arguments = arguments_of(name, 16, 1)
        value, _ = exactly(name, arguments)
        for row in zip(*arguments, value, strict=True):
            if abs(row[-1]) >= 2.0**-1022:
                lines.append(" ".join([name, *(float(x).hex() for x in row)]))
    TABLE.write_text("\n".join(lines) + "\n", encoding="ascii")
