"""One selection that is run: K candidates of a space, or of a search that looks at what came before, and the best."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxacct.core.progress import Progress
from jaxacct.selection import Law
from jaxacct.training.plan import Plan
from jaxacct.tuning.adaptive_search import Adaptive, in_turn
from jaxacct.tuning.best_candidate import best_few, several
from jaxacct.tuning.keys_and_ledger import Secret
from jaxacct.tuning.padding import numbers_to_train
from jaxacct.tuning.side_by_side_training import side_by_side

__all__ = ["Runs", "Winner"]


@dataclass(frozen=True)
class Winner:
    """One of the candidates that a tuning releases.

    Parameters
    ----------
    params : pytree
    config : dict
        Its hyper-parameters.
    score : float
        By which it won.
    plan : Plan, optional
        By which it was trained; None of `tune_with`.

    >>> Winner(0.0, {"rate": 0.1}, 0.9).config
    {'rate': 0.1}
    """

    params: Any
    config: dict[str, Any]
    score: float
    plan: Plan | None = field(repr=False, default=None)


@dataclass(frozen=True)
class Runs:
    """What all candidates of a tuning have in common; programs are compiled once, whatever the number of rounds."""

    loss_fn: Callable[..., Any]
    make_optimizer: Callable[[Mapping[str, Any]], Any]
    data: Any
    plans: Sequence[Plan]
    init: Callable[[Any], Any]
    value_of: Callable[[Secret], Callable[[Any, int], float]]
    shared: Mapping[str, Any]
    programs: dict[Any, Any] = field(default_factory=dict)

    def best(
        self, space: Any, law: Law, pad: int | None, top: int, secret: Secret, progress: bool | None
    ) -> tuple[list[Winner], Winner]:
        """(the best `top` of K candidates, best first; what is released where there is none)."""
        count, work = numbers_to_train(law, pad)
        if isinstance(space, Adaptive):
            return self._in_turn(space, count, top, secret, progress)
        configs = [dict(space.sample(secret.key(b"config", number))) for number in range(max(work, 1))]
        kinds = [self._kind(config, secret, number) for number, config in enumerate(configs)]
        bar = Progress(work, progress if pad else False, unit="candidates")
        group = lambda kind: self._trained(kind, secret, configs)
        found = best_few(kinds[:work], group, self.value_of(secret), count, top, bar)
        winners = [Winner(params, configs[n], score, self.plans[kinds[n][0]]) for n, params, score in found]
        return winners, self._nothing(configs[0], kinds[0][0], secret)

    def _in_turn(
        self, search: Adaptive, count: int, top: int, secret: Secret, progress: bool | None
    ) -> tuple[list[Winner], Winner]:
        configs: dict[int, Mapping[str, Any]] = {}

        def train(config: dict[str, Any], number: int) -> Any:
            configs[number] = config
            return self._trained(self._kind(config, secret, number), secret, configs)([number])[0]

        # K is paid for as public, so that progress may show it
        bar = Progress(count, progress, unit="candidates")
        found = in_turn(search, count, train, self.value_of(secret), top, secret, bar)
        plan_of = lambda number: self.plans[secret.choice(b"setting", number, len(self.plans))]
        winners = [Winner(params, config, score, plan_of(number)) for config, number, params, score in found]
        first = winners[0].config if winners else search.proposed([], secret.key(b"config", 0))
        return winners, self._nothing(first, secret.choice(b"setting", 0, len(self.plans)), secret)

    def _kind(self, config: Mapping[str, Any], secret: Secret, number: int) -> tuple[int, tuple[Any, ...]]:
        """(which plan, the words and Nones), which candidates that are trained side by side have in common."""
        words = tuple((name, x) for name, x in config.items() if x is None or isinstance(x, str))
        return secret.choice(b"setting", number, len(self.plans)), words

    def _trained(
        self, kind: tuple[int, tuple[Any, ...]], secret: Secret, configs: Any
    ) -> Callable[[Sequence[int]], list[Any]]:
        """Trains the candidates of one plan and choice of words."""
        place, words = kind
        if kind not in self.programs:
            optimizer = lambda numbers: self.make_optimizer({**numbers, **dict(words)})
            self.programs[kind] = side_by_side(self.loss_fn, optimizer, self.plans[place], **self.shared)
        train = self.programs[kind]
        return several(
            lambda params, columns, keys: train(params, columns, keys, self.data), secret, self.init, configs
        )

    def _nothing(self, config: dict[str, Any], place: int, secret: Secret) -> Winner:
        """First parameters and a configuration that no data enter."""
        return Winner(jax.device_get(self.init(secret.key(b"init", 0))), config, float("nan"), self.plans[place])
