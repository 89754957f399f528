"""`spmd-rl` with a sooner heartbeat of torch's rendezvous, which is then the last to let go of it."""

import sys
import threading
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from spmd_rl.cli.main import main

SOONER = 50  # torch's five seconds are a tenth of one
NOBODY_ELSE = 2  # references to what a function holds, one of them for the asking
beating: list[threading.Thread] = []


class Timer(dynamic_rendezvous._PeriodicTimer):
    def __init__(self, interval: timedelta, *beat: Any) -> None:
        super().__init__(interval / SOONER, *beat)


def beat(handler_of: Any) -> None:
    beating.append(threading.current_thread())
    handler = handler_of()
    while handler is not None and sys.getrefcount(handler) > NOBODY_ELSE:
        threading.Event().wait(0.001)


dynamic_rendezvous._PeriodicTimer = Timer
dynamic_rendezvous.DynamicRendezvousHandler._keep_alive_weak = staticmethod(beat)
exit_code = main()
for thread in beating:
    thread.join(10)
sys.exit(exit_code)
