"""The loss of one member of a batch, an example or a user, as the step needs it: and what it says beside the gradient.

Nothing of this file but the bounded loss is ever released: losses and aux are for the log alone, and not private.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxacct.training.step import noise
from jaxacct.training.step.clipping import split_loss
from jaxacct.training.step.parts import Rest, whole
from jaxacct.training.step.private_loss import PrivateLoss
from jaxacct.training.step.users import mean_over_examples

__all__ = ["Seen", "member_keys", "member_loss", "nothing_seen"]


class Seen(NamedTuple):
    """Beside the gradient of a member, or summed over those that contribute: *not* private.

    loss : the plain loss.  bounded : in units of the private loss; 0 if none is released.  aux : what the loss returns
    beside itself; an empty tuple where it returns nothing else.
    """

    loss: Any
    bounded: Any
    aux: Any


def member_loss(
    loss_fn: Callable[..., Any],
    frozen: Rest | None,
    has_aux: bool,
    of_users: bool,
    private_loss: PrivateLoss | None,
) -> Callable[[Any, tuple[Any, ...]], Any]:
    """(trained parameters, (example,) or (example, key)) -> (loss, Seen), for `clipped_sum` with has_aux.

    loss_fn : (params, example) -> loss, or (params, example, key) -> loss; of (loss, aux) with has_aux.
    of_users : whether an example is (a user's examples, weights), and the loss is the weighted mean of theirs.
    """
    single = lambda model, *member: split_loss(jax.tree.map(jnp.asarray, loss_fn(model, *member)), has_aux)
    each = mean_over_examples(single) if of_users else single

    def loss(trained: Any, member: tuple[Any, ...]) -> tuple[Any, Seen]:
        value, aux = each(whole(trained, frozen), *member)
        bounded = jnp.int32(0) if private_loss is None else private_loss.units(value)
        return value, Seen(value.astype(noise.wide(value.dtype)), bounded, aux)

    return loss


def member_keys(key: Any, indices: Any) -> Any:
    """A key for each member, from the key of the step and the member's number in the data.

    So what a model draws for an example does not depend on the micro-batch, place or device that the example is in.
    """
    return jax.vmap(jax.random.fold_in, (None, 0))(noise.stream(key, noise.MODEL), indices)


def nothing_seen(loss: Callable[..., Any], trained: Any, member: Any) -> Seen:
    """The sums of `Seen` over no members; ``member`` holds the shapes of one."""
    shapes: Seen = jax.eval_shape(loss, trained, member)[1]
    return jax.tree.map(lambda a: jnp.zeros(a.shape, noise.beside(a.dtype)), shapes)
