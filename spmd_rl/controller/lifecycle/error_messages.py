"""Errors about ranks and calls: which rank, in which call and phase, since when."""

from __future__ import annotations

import traceback

from spmd_rl import errors
from spmd_rl.controller.channel.messages import Failure
from spmd_rl.controller.lifecycle.calls import CallRecord
from spmd_rl.errors import RemoteError, SpmdError, printable


def in_call(record: CallRecord | None) -> str:
    """Return the clause that says in which call and phase a rank is, and for how long."""
    if record is None:
        return "between calls"
    phase = f" (phase {record.phase})" if record.phase else ""
    return f"in {record.what}{phase} after {record.age_s:.1f} s"


def failure_of(error: BaseException) -> Failure:
    """Return the message that carries an exception to the controller."""
    return Failure(
        kind=type(error).__name__,
        sentence=printable(str(error)),
        traceback=printable("".join(traceback.format_exception(error))),
        exit_code=error.exit_code if isinstance(error, SpmdError) else 1,
    )


def remote_error(what: str, rank: int, failure: Failure) -> SpmdError:
    """Return what a worker raised: an error of our tree as itself, any other as a RemoteError."""
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, SpmdError) and kind is not RemoteError:
        error = kind.__new__(kind)
        error.args = (failure.sentence,)
        error.add_note(f"rank {rank}, {what}:\n{failure.traceback}")
        return error
    role, _, call = what.partition(".")
    return RemoteError(
        rank=rank,
        role=role,
        call=call,
        kind=failure.kind,
        sentence=failure.sentence,
        remote_traceback=failure.traceback,
        exit_code=failure.exit_code,
    )
