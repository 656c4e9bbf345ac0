"""Ahead: items made in a thread, some before they are asked for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from typing import Any, Generic, TypeVar

from jaxacct.core.progress import say

__all__ = ["Ahead"]

Item = TypeVar("Item")
_PATIENCE = 1.0
"""Seconds of waiting for a thread to end before a line says so."""


class Ahead(Generic[Item]):
    """The items of a generator, so many of them made ahead in a thread; with 0 they are made when they are asked for.

    What the generator raises is raised by `take`, in its place.  `close` ends generator and thread; a generator that is
    busy must look at ``stop`` from time to time.
    """

    def __init__(self, items: Generator[Item, Any, Any], depth: int, stop: threading.Event) -> None:
        self._items, self._stop = items, stop
        self._room = threading.Semaphore(depth)
        self._made: queue.SimpleQueue[tuple[Item | None, BaseException | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="jaxacct source", daemon=True) if depth else None
        if self._thread is not None:
            self._thread.start()

    def take(self) -> Item:
        """The next item; StopIteration after the last one."""
        if self._thread is None:
            return next(self._items)
        item, error = self._made.get()
        if error is not None:
            self._made.put((None, error))  # nothing comes after it
            raise error
        self._room.release()
        return item  # type: ignore[return-value]  # an item, where there is no error

    def _run(self) -> None:
        try:
            while True:
                self._room.acquire()
                if self._stop.is_set():
                    return
                self._made.put((next(self._items), None))
        except BaseException as error:  # whatever it is, the thread that waits must hear of it
            self._made.put((None, error))
        finally:
            self._items.close()

    def close(self) -> None:
        """End the thread, which is waited for."""
        self._stop.set()
        self._room.release()
        if self._thread is None:
            self._items.close()
            return
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            say("waiting for the source to finish what it is loading")
            self._thread.join()
