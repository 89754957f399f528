"""What every contender does: send each worker an array of bytes, and have them all back."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peer import Laps

Array = NDArray[np.uint8]
Call = Callable[[list[Array]], Sequence[Any]]


def serve(num_workers: int, call: Call) -> None:
    """Run the laps that the driver asks for, at the size of array that it names.

    The reply has each lap's `seconds`, and the processor time of this process, the caller's, in
    `caller_s` a lap.
    """
    laps, random = Laps(), np.random.default_rng(0)
    while True:
        request = laps.request()
        parts = [
            random.integers(0, 256, request["size"], dtype=np.uint8) for _ in range(num_workers)
        ]
        back, seconds, busy_s = [], [], time.process_time()
        for _ in range(request["laps"]):
            began = time.perf_counter()
            back = list(call(parts))
            seconds.append(time.perf_counter() - began)
        busy_s = time.process_time() - busy_s
        if [bytes(part) for part in back] != [bytes(part) for part in parts]:
            sys.exit("what came back is not what was sent")
        laps.reply(seconds=seconds, caller_s=busy_s / request["laps"])
