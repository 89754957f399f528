"""SGLang's scheduler in the child, with the calls of its rank added. This file imports SGLang.

Each call is a method of the scheduler, because SGLang calls methods by their names. A call that
fails is told to the rank on its socket as well, where it may wait for an answer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from spmd_rl.errors import SpmdError
from spmd_rl.rollout.sglang.child_calls import (
    CALLS,
    OF_SINKS,
    SETTLE,
    Call,
    ChildContext,
)
from spmd_rl.rollout.sglang.messages import CallDone, ChildReady, ChildSpec
from spmd_rl.weights.slab.peer_socket import PeerFailure, PeerSocket

SPEC_DEADLINE_S = 120.0
OTHER_RANKS = (0, 0, 0, 0, None)  # in SGLang's other kinds of parallelism, each of size 1


def run(socket: PeerSocket, began_s: float) -> None:
    """Build the scheduler that the rank describes, and run it until the process is ended.

    `began_s` is the time at which the child started.
    """
    spec = socket.receive(SPEC_DEADLINE_S)
    if not isinstance(spec, ChildSpec):
        raise SpmdError(f"{type(spec).__name__} came in place of the child's description")
    seconds, mark = {}, time.monotonic()
    seconds["python"] = mark - began_s
    import sglang
    from sglang.srt.managers import io_struct
    from sglang.srt.managers.scheduler import Scheduler, configure_scheduler_process
    from sglang.srt.server_args import (
        PortArgs,
        ServerArgs,
        set_global_server_args_for_scheduler,
    )

    seconds["imports"], mark = time.monotonic() - mark, time.monotonic()
    version: str = sglang.__version__
    check_version(version, spec.versions)
    check_fields(io_struct, spec.fields)
    server_args, port_args = ServerArgs(**spec.server_args), PortArgs(**spec.port_args)
    seconds["options"], mark = time.monotonic() - mark, time.monotonic()
    ranks = (spec.gpu_id, spec.tp_rank, *OTHER_RANKS)
    configure_scheduler_process(server_args, *ranks)
    set_global_server_args_for_scheduler(server_args)  # 0.5.17's scheduler reads them
    with_calls = scheduler_class(Scheduler, socket, tells_end=spec.tp_rank > 0)
    scheduler = with_calls(server_args, port_args, *ranks)
    seconds["scheduler"] = time.monotonic() - mark
    max_num_tokens = int(scheduler.get_init_info()["max_total_num_tokens"])
    socket.send(ChildReady(version, max_num_tokens, seconds))
    scheduler.run_event_loop()


def check_version(version: str, known: list[str]) -> None:
    if version not in known:
        raise SpmdError(f"SGLang {version} is none of the versions {', '.join(known)}")


def check_fields(io_struct: Any, mirrors: Mapping[str, list[str]]) -> None:
    """Raises: SpmdError unless SGLang's struct begins with each mirror's fields.

    One that is sent as a map need only have them.
    """
    for name, fields in mirrors.items():
        struct = getattr(io_struct, name)
        actual = struct.__struct_fields__
        if not struct.__struct_config__.array_like and set(fields) <= set(actual):
            continue
        if list(actual[: len(fields)]) != fields:
            raise SpmdError(
                f"SGLang's {name} begins with the fields {', '.join(actual[: len(fields)])}, and "
                f"spmd_rl expects {', '.join(fields)}: install another version of SGLang"
            )


def scheduler_class(base: type, socket: PeerSocket, tells_end: bool = False) -> type[Any]:
    """Return SGLang's scheduler with a method for each call of the rank.

    With `tells_end`, the rank is told at its socket when a call has ended for which its sink waits,
    because SGLang answers the first rank of a group alone.
    """
    kept: dict[str, Any] = {}
    methods = {
        name: _method(name, socket, kept, tells_end and name in OF_SINKS)
        for name in (*OF_SINKS, SETTLE)
    }
    return type("SpmdScheduler", (base,), methods)


def _method(name: str, socket: PeerSocket, kept: dict[str, Any], tells_end: bool) -> Call:
    def method(scheduler: Any, **parameters: Any) -> None:
        # it imports torch, and a module of other calls would be imported here too
        import spmd_rl.rollout.sglang.child_weights  # noqa: F401

        try:
            CALLS[name](ChildContext(scheduler, socket, kept), **parameters)
        except Exception as error:
            # SGLang reports it as the answer to the call; the rank may wait at the socket instead
            with contextlib.suppress(SpmdError):
                socket.send(PeerFailure(f"{name}: {error}"))
            raise
        if tells_end:
            socket.send(CallDone(name))

    return method
