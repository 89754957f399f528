"""A dump of hidden states in a safetensors file, checked when it is opened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.errors import ConfigError, DataError
from spmd_rl.microscope.foreign.layout import (
    DTYPES,
    POSITIONS,
    SCORED,
    SCORED_OPS,
    TOKENS,
    StoredHeader,
    check_metadata,
    check_points,
)
from spmd_rl.microscope.replay.case import ReplayCase
from spmd_rl.microscope.replay.forward_pass import ForwardPass
from spmd_rl.microscope.taps.points import Point
from spmd_rl.microscope.taps.taps import Tap
from spmd_rl.model.spec import ModelSpec


class Dump:
    """Hidden states in a file. Only `read` reads them; the file stays open.

    `metadata` says which program computed what, and `dtype` is the one that it computed in.
    """

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        """Raises: ConfigError if there is no file; DataError if it is not in the layout."""
        self.path = path
        self._file = _open(path)
        self.metadata: dict[str, str] = dict(self._file.metadata() or {})
        check_metadata(str(path), self.metadata)
        self.dtype = DTYPES[self.metadata["dtype"]]
        headers = _headers(self._file)
        self._names = check_points(str(path), headers, spec)
        self.points = sorted(self._names, key=lambda point: point.order)
        self.tokens, self.positions, self.scored = (
            self._integers(name) if name in headers else np.zeros(0, np.int64)
            for name in (TOKENS, POSITIONS, SCORED)
        )
        self._check_rows()

    @property
    def starts(self) -> NDArray[np.int64]:
        """The first row of every sequence."""
        return np.flatnonzero(self.positions == 0)

    def read(self, point: Point, start: int, end: int) -> Tensor:
        """Return rows of a point, flattened; of logits and log-probs, those of `scored`.

        Shape: returns [end - start, C] on the CPU, in float32 or bfloat16.
        """
        part: Tensor = self._file.get_slice(self._names[point])[start:end]
        return (part.float() if part.dtype == torch.float16 else part).reshape(end - start, -1)

    def _integers(self, name: str) -> NDArray[np.int64]:
        values: NDArray[np.int64] = self._file.get_tensor(name).numpy().astype(np.int64)
        return values

    def _check_rows(self) -> None:
        """Raise a DataError unless positions count from 0, and scored rows have a next token."""
        where = str(self.path)
        begins = self.positions == 0
        steps = np.diff(self.positions)
        if not begins[0] or not ((steps == 1) | begins[1:]).all():
            raise DataError(where, "'positions' does not count from 0 in each sequence")
        scored = self.scored
        if not len(scored):
            return
        if (np.diff(scored) <= 0).any() or scored[0] < 0 or scored[-1] >= len(begins):
            raise DataError(where, "'scored' is not an ascending list of rows")
        if np.append(begins, True)[scored + 1].any():
            raise DataError(where, "'scored' names the last row of a sequence: no token follows it")


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ConfigError(f"--dump {path} is not a file: name a dump of hidden states")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise DataError(str(path), f"not a readable safetensors file: {error}") from None


def _headers(file: Any) -> dict[str, StoredHeader]:
    headers = {}
    for name in file.keys():  # noqa: SIM118 (safe_open is not a mapping)
        part = file.get_slice(name)
        headers[name] = StoredHeader(part.get_dtype(), tuple(part.get_shape()))
    return headers


def locate_sequences(dump: Dump, case: ReplayCase) -> list[int]:
    """Return the first row of each sequence of `case` in the dump, which may hold more.

    Raises: DataError if one is not there, or if its log-probs are not.
    """
    start_of: dict[bytes, int] = {}
    for start, tokens in _sequences(dump):
        start_of.setdefault(tokens.tobytes(), start)
    starts = []
    for sequence in case.sequences:
        found = start_of.get(sequence.tokens.astype(np.int64).tobytes())
        if found is None:
            raise DataError(str(dump.path), _what_differs(dump, sequence.name, sequence.tokens))
        starts.append(found)
    if len(dump.scored):
        _require_scored(dump, case, starts)
    return starts


def _sequences(dump: Dump) -> list[tuple[int, NDArray[np.int64]]]:
    """Return the first row and the tokens of every sequence."""
    ends = np.append(dump.starts[1:], len(dump.tokens))
    return [
        (int(start), dump.tokens[start:end]) for start, end in zip(dump.starts, ends, strict=True)
    ]


def _what_differs(dump: Dump, name: str, tokens: NDArray[np.integer[Any]]) -> str:
    """Say that no sequence has these tokens, and where the most alike one differs."""
    position, other = max(
        ((_num_shared(tokens, other), other) for _, other in _sequences(dump)),
        key=lambda pair: pair[0],
    )
    return (
        f"it has no sequence with the tokens of {name}: the most alike has "
        f"{_token(other, position)} at position {position}, and {name} has "
        f"{_token(tokens, position)} "
        "(--write-inputs writes the tokens)"
    )


def _num_shared(tokens: NDArray[np.integer[Any]], other: NDArray[np.int64]) -> int:
    """Return how many tokens the two have in common from their beginning."""
    length = min(len(tokens), len(other))
    unequal = np.flatnonzero(tokens[:length] != other[:length])
    return int(unequal[0]) if len(unequal) else length


def _token(tokens: NDArray[np.integer[Any]], position: int) -> str:
    return f"token {tokens[position]}" if position < len(tokens) else "no token"


def _require_scored(dump: Dump, case: ReplayCase, starts: Sequence[int]) -> None:
    """Raise a DataError unless every response token of `case` has a scored row before it."""
    scored = set(dump.scored.tolist())
    for number, start in enumerate(starts):
        for position in case.scored_positions(number).tolist():
            if start + position not in scored:
                raise DataError(
                    str(dump.path),
                    f"'scored' lacks row {start + position}, which predicts a response token of "
                    f"{case.sequences[number].name} (position {position})",
                )


class DumpPass(ForwardPass):
    """One side of a comparison whose ops ran in another program.

    Nothing can be patched into it, so the other side takes its values.
    """

    is_recorded = True

    def __init__(self, dump: Dump, device: torch.device, name: str = "dump") -> None:
        """`device` is that of the other side."""
        super().__init__(device, dump.dtype)
        self.name, self.dump = name, dump

    def run(self, case: ReplayCase, tap: Tap) -> None:
        for number, start in enumerate(locate_sequences(self.dump, case)):
            self._show_sequence(case, tap, number, start)

    def _show_sequence(self, case: ReplayCase, tap: Tap, number: int, start: int) -> None:
        """Show the tap one sequence, which begins at row `start` of the dump."""
        rows = torch.from_numpy(case.rows(number)).to(self.device)
        positions = case.scored_positions(number)
        tap.begin_forward(rows, None, rows[torch.from_numpy(positions).to(self.device)])
        first = int(np.searchsorted(self.dump.scored, start + positions[0]))
        scored, all_rows = (first, first + len(positions)), (start, start + len(rows))
        for point in self.dump.points:
            x = self.dump.read(point, *(scored if point.op in SCORED_OPS else all_rows))
            tap.observe(point, as_observed(point, x).to(self.device))


def as_observed(point: Point, x: Tensor) -> Tensor:
    """Return `x` in the shape in which a pass shows it: log-probs are a vector."""
    return x[:, 0] if point.op == "logprob" else x
