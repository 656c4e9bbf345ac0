"""Encloses delta of sampled Gaussian steps with little noise, by a sum over the number of steps that hit the record.

Proof: README.md of this folder, "Little noise".
"""

from __future__ import annotations

from typing import Any

from jaxacct.verification.ball_arithmetic import arb, between, gaussian_tail, tick
from jaxacct.verification.closed_form_losses import GaussianLoss
from jaxacct.verification.sampled_gaussian import SampledGaussian

MOST_HITS = 100_000
"""Largest number of hits for which a term is computed. Runs that expect half as many are left to other methods."""


def applies(parts: Any) -> bool:
    """Return whether the parts are steps of one sampled Gaussian of little noise, and any unsampled Gaussians."""
    sampled = [(part, n) for part, n in parts if type(part) is SampledGaussian]
    if len(sampled) != 1 or not all(type(part) in (SampledGaussian, GaussianLoss) for part, _ in parts):
        return False
    ((law, n),) = sampled
    return bool(law.sigma < 0.12 and n * law.rate < MOST_HITS / 2)


def enclose(parts: Any, epsilon: Any) -> Any:
    """Enclose delta(epsilon) in one direction. The result is wide if outputs do not show which steps were hits."""
    ((law, n),) = [(part, count) for part, count in parts if type(part) is SampledGaussian]
    beside = sum((count * part.square for part, count in parts if type(part) is GaussianLoss), arb(0))
    q, s = law.rate, 1 / law.sigma
    threshold = s * (arb(2).sqrt() - 1)
    misled = (n * gaussian_tail(threshold)).min(1).upper()
    share = (q / (1 - q)).max((1 - q) / q)
    excess = between(0, (n * share * (s * (threshold - s / 2)).exp()).upper())
    if law.direction == "add":
        sure = _hockey_stick(beside, epsilon + n * (1 - q).log() + excess)
        return between(((1 - misled) * sure).lower(), sure.upper())
    chance, total, rest = (1 - q) ** n, arb(0), arb(0)
    negligible = arb(2) ** -1200
    for hits in range(min(int(n), MOST_HITS) + 1):
        if hits % 64 == 0:
            tick()
        if chance > negligible:
            loss = hits * q.log() + (n - hits) * (1 - q).log() + excess
            total += chance * _hockey_stick(beside + hits * s**2, epsilon - loss)
        else:
            rest += chance
        ratio = (n - hits) / arb(hits + 1) * q / (1 - q)
        chance *= ratio
        if ratio < 0.5 and chance < negligible:
            break
    # each later chance is at most `ratio` times the one before, since the ratios fall
    left = 2 * chance if ratio < 0.5 else arb(1)
    return total + between(0, (rest + left + misled).upper())


def _hockey_stick(square: Any, epsilon: Any) -> Any:
    """Return delta(epsilon) of composed Gaussians, or of the loss 0 if there are none."""
    return (-epsilon.expm1()).max(0) if square == 0 else GaussianLoss(square).hockey_stick(epsilon)
