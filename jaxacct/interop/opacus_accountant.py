"""A certified accountant with Opacus's IAccountant interface (needs the opacus package)."""

from __future__ import annotations

import math
from typing import Any

from opacus.accountants import IAccountant, register_accountant

from jaxacct.accounting.account import epsilon
from jaxacct.core.validation import COUNT, DELTA, NON_NEGATIVE, PROBABILITY, InputError, check, check_one
from jaxacct.mechanisms import Mechanism, PureDP, compose, dp_sgd

MECHANISM = "jaxacct"
"""The name of the accountant in Opacus's registry and in saved states."""


class OpacusAccountant(IAccountant):
    """An accountant for DP-SGD in Opacus. It certifies upper bounds of epsilon for adding or removing one record.

    `history` is Opacus's list of (noise_multiplier, sample_rate, steps). Users may assign it, as Opacus's own
    `get_noise_multiplier` does; its values are checked at every reading. `len` returns the number of steps. Steps
    without noise make epsilon infinite. Every batch must be a Poisson sample.

    After `register_opacus()` Opacus finds the accountant by name: `PrivacyEngine(accountant="jaxacct")`,
    `get_noise_multiplier(accountant="jaxacct", ...)`.

    >>> accountant = OpacusAccountant()
    >>> for _ in range(1000):
    ...     accountant.step(noise_multiplier=1.0, sample_rate=0.01)
    >>> round(accountant.get_epsilon(1e-5), 5)
    1.82824
    """

    history: list[Any]

    def __init__(self) -> None:  # required, since Opacus's class declares it abstract
        super().__init__()

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Record one step; raise InputError for values out of range."""
        sigma = float(check("noise_multiplier", noise_multiplier, NON_NEGATIVE))
        rate = float(check("sample_rate", sample_rate, PROBABILITY))
        if self.history and tuple(self.history[-1][:2]) == (sigma, rate):
            self.history[-1] = (sigma, rate, self.history[-1][2] + 1)
        else:
            self.history.append((sigma, rate, 1))

    def get_epsilon(
        self, delta: float, alphas: Any = None, *, poisson: bool = True, eps_error: Any = None, delta_error: Any = None
    ) -> float:
        """Return a certified upper bound of epsilon at `delta`, which must be strictly between 0 and 1.

        alphas, eps_error, delta_error : ignored; Opacus's accountants have them.
        poisson : False is refused.
        """
        if not poisson:
            raise InputError("poisson = False is not supported; account for shuffled batches with ja.ShuffledBatches")
        target = check_one("delta", delta, DELTA, "ask for one at a time")
        if any(sigma == 0 and rate > 0 for sigma, rate, _ in self._entries()):
            return math.inf
        return float(epsilon(self.run, target).upper)

    @property
    def run(self) -> Mechanism:
        """The mechanism of the steps so far, for `jaxacct.epsilon` and the rest of the library."""
        steps = [dp_sgd(sigma, rate, count) for sigma, rate, count in self._entries() if rate > 0]
        return compose(*steps) if steps else PureDP(0.0)

    def __len__(self) -> int:
        return sum(int(count) for _, _, count in self._entries())

    @classmethod
    def mechanism(cls) -> str:
        """Return this accountant's name in Opacus's registry and in saved states."""
        return MECHANISM

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a saved state of this accountant. If its history is invalid, raise an error and keep the old state."""
        before = self.history
        super().load_state_dict(state_dict)
        try:
            self.history = self._entries()
        except InputError:
            self.history = before
            raise

    def _entries(self) -> list[tuple[float, float, int]]:
        """Check every value of the history, and return the entries."""
        if not isinstance(self.history, list | tuple):
            raise InputError(f"history must be a list, not {type(self.history).__name__}; use [(1.0, 0.01, 100)]")
        entries = []
        for i, entry in enumerate(self.history):
            if not isinstance(entry, list | tuple) or len(entry) != 3:
                raise InputError(f"history[{i}] must be (noise_multiplier, sample_rate, steps); use (1.0, 0.01, 100)")
            rules = {"noise_multiplier": NON_NEGATIVE, "sample_rate": PROBABILITY, "steps": COUNT}
            named = zip(rules.items(), entry, strict=True)
            sigma, rate, count = (float(check(f"history[{i}].{name}", value, rule)) for (name, rule), value in named)
            entries.append((sigma, rate, int(count)))
        return entries


def register_opacus() -> None:
    """Register `accountant="jaxacct"` with Opacus; a second call changes nothing.

    >>> from opacus.accountants import create_accountant
    >>> register_opacus()
    >>> type(create_accountant("jaxacct")).__name__
    'OpacusAccountant'
    """
    register_accountant(MECHANISM, OpacusAccountant, force=True)
