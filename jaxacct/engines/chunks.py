"""Batches of any size through one compiled program: chunks of one fixed shape, on every core or device there is.

A chunk has the same shape whatever the number of devices, and each device compiles the same program, so that results
do not depend on how many devices took part, to the last bit.  (One program partitioned over a mesh would not do: XLA
fuses it otherwise than the program of one device, and the last bits differ.)
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxacct.engines.programs import Run


def in_chunks(compiled: Run, chunk: int, arguments: Any, size: int) -> list[np.ndarray]:
    """Run a compiled program over a batch, `chunk` configurations at a time; the last chunk is padded.

    The chunks go to the devices in turn, several of them in flight at a time.  Under `jax.distributed` these are
    the devices of this process alone.
    """
    devices = jax.local_devices()

    def one(start: int) -> list[np.ndarray]:
        index = np.minimum(np.arange(start, start + chunk), size - 1)
        with jax.enable_x64():
            piece = jax.tree.map(lambda a: a[index], arguments)
            if len(devices) > 1:
                piece = jax.device_put(piece, devices[start // chunk % len(devices)])
            return [np.asarray(x) for x in compiled(*piece)]

    starts = range(0, size, chunk)
    if len(starts) > 1:
        with ThreadPoolExecutor(max(os.cpu_count() or 1, 2 * len(devices) - 1)) as pool:
            pieces = list(pool.map(one, starts))
    else:
        pieces = [one(start) for start in starts]
    return [np.concatenate(columns)[:size] for columns in zip(*pieces, strict=True)]
