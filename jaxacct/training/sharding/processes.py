"""The processes of one run, as `jax.distributed` starts them: one of them writes, all go on together.

What is told or gathered here is also a barrier: no process has the answer before the first one has given it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxacct.core.validation import InputError

_FRAME = 256
"""Bytes of a message that are sent together with its length; a longer one takes a second round."""
_DONE, _REFUSED, _FAILED = b"D", b"R", b"F"


class Processes:
    """How many processes take the steps of a run, and which of them this is."""

    def __init__(self, count: int, number: int) -> None:
        self.count, self.number = count, number

    @classmethod
    def of(cls, mesh: Any) -> Processes:
        """The processes that a mesh's devices belong to: this one, or all of them; InputError for any other set."""
        import jax

        own, there = jax.process_index(), sorted({device.process_index for device in mesh.devices.flat})
        if there == [own]:
            return ALONE
        if there != list(range(jax.process_count())):
            raise InputError(
                f"mesh has devices of processes {there}, must have some of all {jax.process_count()}, or this one's "
                "alone; make it from jax.devices() or from jax.local_devices()"
            )
        return cls(len(there), own)

    @property
    def first(self) -> bool:
        """Whether this is the process that writes the ledger."""
        return self.number == 0

    def gather(self, own: bytes) -> list[bytes]:
        """The bytes that every process gives, in the order of the processes."""
        if self.count == 1:
            return [own]
        from jax.experimental.multihost_utils import process_allgather

        together = lambda content, room: np.asarray(process_allgather(np.frombuffer(content.ljust(room, b"\0"), "u1")))
        head = len(own).to_bytes(8, "little") + own
        frames = [bytes(row) for row in together(head[:_FRAME], _FRAME)]
        lengths = [int.from_bytes(frame[:8], "little") for frame in frames]
        if max(lengths) > _FRAME - 8:
            room = max(lengths) - (_FRAME - 8)
            rest = together(head[_FRAME:], -(-room // _FRAME) * _FRAME)  # few sizes: each is compiled
            frames = [frame + bytes(row) for frame, row in zip(frames, rest, strict=True)]
        return [frame[8 : 8 + length] for frame, length in zip(frames, lengths, strict=True)]

    def tell(self, told: bytes) -> bytes:
        """The bytes that the first process gives; those of the others are ignored."""
        return self.gather(told if self.first else b"")[0]

    def decide(self, function: Callable[[], bytes]) -> bytes:
        """Run a function in the first process only; its result, or its exception, goes to all processes."""
        if self.count == 1:
            return function()
        kind, answer = _DONE, b""
        raised: BaseException | None = None
        if self.first:
            try:
                answer = function()
            except InputError as error:
                kind, answer, raised = _REFUSED, str(error).encode(), error
            except BaseException as error:
                kind, answer, raised = _FAILED, f"{type(error).__name__}: {error}".encode(), error
        told = self.tell(kind + answer)
        if raised is not None:
            raise raised
        if told[:1] == _REFUSED:
            raise InputError(told[1:].decode())
        if told[:1] == _FAILED:
            raise RuntimeError(f"the first process failed: {told[1:].decode()}")
        return told[1:]

    def agree(self, name: str, own: bytes) -> None:
        """Raise InputError if the processes were given different values."""
        everyone = self.gather(own)
        others = [number for number, given in enumerate(everyone) if given != everyone[0]]
        if others:
            raise InputError(f"{name} of process {others[0]} is another than that of process 0; give all the same")

    def any(self, *own: bool) -> tuple[bool, ...]:
        """For each question, whether any process answers yes."""
        return tuple(any(answers) for answers in zip(*self.gather(bytes(own)), strict=True))


ALONE = Processes(1, 0)
"""A run of one process."""
