"""The running sequences as arrays, one row each: a step takes a few numpy calls for all of them.

A sequence that is removed, for whatever reason, becomes the `Request` that would resume it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, count, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spmd_rl.kernels import stream_bases
from spmd_rl.kernels.runtime.ragged import offsets_within
from spmd_rl.rollout.answer_columns import AnswerColumns
from spmd_rl.rollout.engine import ALL_TOKENS, Request
from spmd_rl.types.token_data import TokenData

NO_STOP_ID = -1
SHARED_PAGE = -1
NO_SEQUENCE = 0
_INTEGERS = (
    "uid",
    "index",
    "sequence_id",
    "seed",
    "top_k",
    "num_pages",
    "num_published_pages",
    "prompt_length",
    "length",
    "num_pending",
    "num_computed",
    "max_length",
)
_FLOATS = ("inv_temperature", "top_p", "min_p")
_FLAGS = ("greedy", "replays")
_COLUMNS = (*_INTEGERS, *_FLOATS, *_FLAGS)
_STATE = np.dtype(
    [
        *((name, np.int64) for name in _INTEGERS),
        *((name, np.float32) for name in _FLOATS),
        *((name, np.bool_) for name in _FLAGS),
    ]
)


class Fork(NamedTuple):
    """`row` continues the prompt of row `parent`.

    It has a last page of its own, or shares all pages if the prompt ends with a page.
    """

    row: int
    parent: int
    last_page: int = SHARED_PAGE


_NO_COLUMNS: Mapping[str, NDArray[Any]] = {}


class SequenceTable:
    """At most `num_rows` sequences of at most `max_tokens` tokens.

    `length` counts a row's tokens. The last `num_pending` of them are being sampled by steps in
    flight, and the host does not have them yet. `num_computed` tokens have K/V in the cache. A
    sequence ends at `max_length`. `sequence_id` differs between all sequences that a row ever had.
    `kept` holds the encoded sets of a row that `replays`, for the tokens that the host has.
    `columns` holds further values of each token. `prompt_routes` are those of `TokenData`.
    Shape: `tokens`, `logprobs`, `versions` [num_rows, max_tokens], prompt first (its log-probs and
    versions are unset); `pages` [num_rows, P]; `stop_ids` [num_rows, S]; all else [num_rows].
    """

    uid: NDArray[np.int64]
    index: NDArray[np.int64]
    sequence_id: NDArray[np.int64]
    seed: NDArray[np.int64]
    top_k: NDArray[np.int64]
    num_pages: NDArray[np.int64]
    num_published_pages: NDArray[np.int64]
    prompt_length: NDArray[np.int64]
    length: NDArray[np.int64]
    num_pending: NDArray[np.int64]
    num_computed: NDArray[np.int64]
    max_length: NDArray[np.int64]
    inv_temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    greedy: NDArray[np.bool_]
    replays: NDArray[np.bool_]

    def __init__(self, num_rows: int, max_tokens: int, page_size: int) -> None:
        self.num_rows = num_rows
        self.page_size = page_size
        self.max_tokens = max_tokens
        self.requests: list[Request | None] = [None] * num_rows
        self.kept = [bytearray() for _ in range(num_rows)]
        self.prompt_routes = [b""] * num_rows
        self.columns = AnswerColumns(num_rows, max_tokens)
        self._free = list(range(num_rows - 1, -1, -1))
        self._sequence_ids = count(NO_SEQUENCE + 1)

        def column(dtype: type, *width: int) -> NDArray[Any]:
            return np.zeros((num_rows, *width), dtype=dtype)

        self.tokens = column(np.int32, max_tokens)
        self.logprobs = column(np.float32, max_tokens)
        self.versions = column(np.int32, max_tokens)
        self.pages = column(np.int64, -(-max_tokens // page_size))
        self.stop_ids = column(np.int32, 1)
        self._state = np.zeros(num_rows, _STATE)
        # numpy copies records field by field, so forks copy their bytes instead.
        self._state_bytes = self._state.view(np.uint8).reshape(num_rows, -1)
        for name in _COLUMNS:
            setattr(self, name, self._state[name])

    @property
    def num_free(self) -> int:
        return len(self._free)

    def add(
        self, request: Request, pages: list[int], num_computed: int, stop_ids: tuple[int, ...]
    ) -> int:
        """Give `request` a row; `pages` already hold K/V of its first `num_computed` tokens."""
        row = self._free.pop()
        self.requests[row] = request
        self._write_answer(row, request)
        self.pages[row, : len(pages)] = pages
        self.num_pages[row] = len(pages)
        self.num_pending[row] = 0
        self.num_computed[row] = num_computed
        self.num_published_pages[row] = num_computed // self.page_size
        self.sequence_id[row] = next(self._sequence_ids)
        self.uid[row], self.index[row] = request.uid, request.index
        self._write_sampling(row, request, stop_ids)
        return row

    def _write_answer(self, row: int, request: Request) -> None:
        """Write the prompt, and the answer so far."""
        prompt, length = len(request.prompt), request.num_tokens
        self.tokens[row, :prompt] = request.prompt
        past = request.past
        self.tokens[row, prompt:length] = past.tokens
        self.logprobs[row, prompt:length] = past.logprobs
        self.versions[row, prompt:length] = past.versions
        # an answer that came without sets was not filtered, or its engine returned none
        num_unknown = len(past) if request.sampling.replays else 0
        self.kept[row] = bytearray(past.kept or bytes(num_unknown))
        self.columns.begin(row, past.columns)
        self.prompt_routes[row] = past.prompt_routes
        self.prompt_length[row] = prompt
        self.length[row] = length
        self.max_length[row] = min(prompt + request.sampling.max_tokens, self.max_tokens)

    def _write_sampling(self, row: int, request: Request, stop_ids: tuple[int, ...]) -> None:
        sampling = request.sampling
        self.seed[row] = request.seed
        self.inv_temperature[row] = np.float32(1) / np.float32(sampling.scored_temperature)
        self.greedy[row] = sampling.temperature == 0
        self.replays[row] = sampling.replays
        self.top_k[row] = sampling.top_k
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        missing = len(stop_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(
                self.stop_ids, ((0, 0), (0, missing)), constant_values=NO_STOP_ID
            )
        self.stop_ids[row] = NO_STOP_ID
        self.stop_ids[row, : len(stop_ids)] = stop_ids

    def reserve(self, requests: list[Request]) -> list[int]:
        """Return a row for each of `requests`, which `fill_forks` will fill."""
        rows = [self._free.pop() for _ in requests]
        for row, request in zip(rows, requests, strict=True):
            self.requests[row] = request
            self.kept[row] = bytearray()
            self.columns.begin(row, {})
            self.prompt_routes[row] = b""
        return rows

    def fill_forks(self, forks: list[Fork]) -> None:
        """Copy the parents' state to the reserved rows, which have last pages of their own."""
        if not forks:
            return
        rows, parents, last_pages = np.array(forks, dtype=np.int64).T
        requests = [request for row in rows.tolist() if (request := self.requests[row]) is not None]
        length, num_pages = self.length[parents], self.num_pages[parents]
        max_length, max_pages = int(length.max()), int(num_pages.max())
        own_page = last_pages != SHARED_PAGE
        self._state_bytes[rows] = self._state_bytes[parents]
        self.stop_ids[rows] = self.stop_ids[parents]
        self.tokens[rows, :max_length] = self.tokens[parents, :max_length]
        self.pages[rows, :max_pages] = self.pages[parents, :max_pages]
        self.pages[rows[own_page], num_pages[own_page] - 1] = last_pages[own_page]
        self.num_computed[rows] = length
        self.sequence_id[rows] = [next(self._sequence_ids) for _ in requests]
        self.uid[rows] = [request.uid for request in requests]
        self.index[rows] = [request.index for request in requests]

    def add_pending(self, rows: NDArray[np.int64]) -> None:
        """Count one more token of each of `rows`, which a step in flight samples."""
        self.length[rows] += 1
        self.num_pending[rows] += 1

    def write_sampled(
        self,
        rows: NDArray[np.int64],
        tokens: NDArray[np.int64],
        logprobs: NDArray[np.float32],
        version: int,
        kept: Sequence[bytes] = (),
        columns: Mapping[str, NDArray[Any]] = _NO_COLUMNS,
    ) -> None:
        """Write the oldest pending token of each of `rows`, which has reached the host.

        `kept` are the encoded sets of these tokens, empty for a row that does not replay. `columns`
        are further values of each, [M] or [M, K].
        """
        position = self.host_length(rows)
        self.tokens[rows, position] = tokens
        self.logprobs[rows, position] = logprobs
        self.versions[rows, position] = version
        self.num_pending[rows] -= 1
        for row, encoded in zip(rows.tolist() if kept else (), kept, strict=True):
            self.kept[row] += encoded
        self.columns.write(rows, position - self.prompt_length[rows], columns)

    def host_length(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many tokens of each of `rows` the host has."""
        return self.length[rows] - self.num_pending[rows]

    def random_bases(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what the random keys of the tokens of `rows` are made from."""
        return stream_bases(self.seed[rows], self.uid[rows], self.index[rows])

    def active_filters(self, rows: NDArray[np.int64]) -> tuple[str, ...]:
        """Return the names of the filters (top_k, top_p, min_p) that any of `rows` asks for."""
        return tuple(
            name for name, off in ALL_TOKENS.items() if (self._state[name][rows] != off).any()
        )

    def append_page(self, row: int, page: int) -> None:
        self.pages[row, self.num_pages[row]] = page
        self.num_pages[row] += 1

    def page_list(self, row: int) -> list[int]:
        return self.page_lists([row])[0]

    def page_lists(self, rows: list[int]) -> list[list[int]]:
        """Return the pages of each of `rows`."""
        counts = self.num_pages[rows].tolist()
        tables = self.pages[rows, : max(counts, default=0)].tolist()
        return [pages[:num] for pages, num in zip(tables, counts, strict=True)]

    def last_page(self, row: int) -> int:
        return int(self.pages[row, self.num_pages[row] - 1])

    def remove(self, rows: list[int]) -> list[Request]:
        """Free `rows`; return their requests, each with the answer that the host has of it."""
        removed = self.answered(rows)
        self.sequence_id[rows] = NO_SEQUENCE
        self._free += rows
        for row in rows:
            self.requests[row] = None
        return removed

    def answered(self, rows: list[int]) -> list[Request]:
        """Return the requests of `rows`, each with the answer that the host has of it."""
        index = np.array(rows, dtype=np.int64)
        first = self.prompt_length[index]
        sizes = self.host_length(index) - first
        answers = np.repeat(index, sizes), np.repeat(first, sizes) + offsets_within(sizes)
        tokens, logprobs = self.tokens[answers], self.logprobs[answers]
        versions = self.versions[answers]
        requests, ends = [], accumulate(sizes.tolist(), initial=0)
        for row, (start, end) in zip(rows, pairwise(ends), strict=True):
            old = self.requests[row]
            assert old is not None
            answer = tokens[start:end], logprobs[start:end], versions[start:end]
            further = self.columns.of(row, end - start), self.prompt_routes[row]
            requests.append(old.after(TokenData(*answer, bytes(self.kept[row]), *further)))
        return requests
