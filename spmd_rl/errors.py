"""Errors that a user can meet, as one tree.

    SpmdError
      ConfigError          before the start: a key, value or file of the configuration is wrong
      PlanError            before the start: the split, memory or weight plan cannot work
      DataError            a record of a data file is wrong: file, line, field
      ContractError        ranks that must agree do not
      RemoteError          code on a worker raised: rank, role, call, its traceback
      DeadlineError        a wait exceeded its deadline: who, what, how long
      LostRankError        a process of the world is gone
      DiskError            a file could not be written: no room, or the system refuses
      WeightMismatchError  two ends of a weight push hold different bytes
      WeightsError         what a rank and the process on its GPU tell each other is refused
        StaleSlabError     a portion names a slab that its reader does not have mapped
      ResidencyError       memory was used, put to sleep or woken in the wrong state

`exit_code` is the exit code of the process. By it a launcher can tell bad input (2) from a failed
run (1).
"""

from __future__ import annotations


def source_line(error: BaseException) -> str:
    """Return the line of a SyntaxError, as the end of a sentence; "" for any other error."""
    return f": {error.text.strip()}" if isinstance(error, SyntaxError) and error.text else ""


def printable(text: str) -> str:
    """Return `text` with control characters escaped, as some of them command a terminal.

    Whoever wrote the text, a model or a stranger's file, can then only be read. Lone surrogates,
    which UTF-8 cannot encode, are escaped too.
    """
    return "\n".join(line if line.isprintable() else _escaped(line) for line in text.split("\n"))


def _escaped(line: str) -> str:
    return "".join(c if c.isprintable() or c in "\t\u3000" else ascii(c)[1:-1] for c in line)


class SpmdError(Exception):
    """Root of the tree; `str(error)` is one sentence for the user."""

    exit_code = 1


class ConfigError(SpmdError):
    exit_code = 2


class PlanError(SpmdError):
    exit_code = 2


class DataError(SpmdError):
    """A record cannot be used. `where` is `file:line` or `file:line: field`."""

    exit_code = 2

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where = where


class ContractError(SpmdError):
    pass


class RemoteError(SpmdError):
    """Code on a worker raised.

    `kind` is the class name of the original error, `sentence` its text, and `remote_traceback` its
    whole traceback.
    """

    def __init__(
        self,
        *,
        rank: int,
        role: str,
        call: str,
        kind: str,
        sentence: str,
        remote_traceback: str,
        exit_code: int = 1,
    ) -> None:
        super().__init__(f"rank {rank} ({role}.{call}): {kind}: {sentence}")
        self.rank = rank
        self.role = role
        self.call = call
        self.kind = kind
        self.sentence = sentence
        self.remote_traceback = remote_traceback
        self.exit_code = exit_code


class DeadlineError(SpmdError):
    pass


class LostRankError(SpmdError):
    pass


class DiskError(SpmdError):
    pass


class WeightMismatchError(SpmdError):
    """The ends of a push hold different bytes. `tensor` is the name of one that differs."""

    def __init__(self, sentence: str, tensor: str = "") -> None:
        super().__init__(sentence)
        self.tensor = tensor


class WeightsError(SpmdError):
    pass


class StaleSlabError(WeightsError):
    pass


class ResidencyError(SpmdError):
    pass
