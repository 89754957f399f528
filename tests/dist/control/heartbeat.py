"""`spmd-rl` with a faster heartbeat of torch's rendezvous, whose thread then releases it last."""

import sys
import threading
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from spmd_rl.cli.main import main

SOONER = 50  # times faster than torch's five seconds
NOBODY_ELSE = 2  # references to the handler: the variable here, and the argument of getrefcount
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
