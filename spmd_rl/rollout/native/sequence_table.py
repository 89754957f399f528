"""The running sequences, as arrays: one row each, so that a step costs a few numpy calls however
many run.

A sequence that leaves, for whatever reason, leaves as the `Request` that would resume it.
"""

from __future__ import annotations

from itertools import accumulate, count, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spmd_rl.kernels import stream_bases
from spmd_rl.kernels.runtime.ragged import offsets_within
from spmd_rl.rollout.engine import ALL_TOKENS, Request

NO_STOP_ID = -1
SHARED_PAGE = -1
_STATE = np.dtype(
    [
        *(
            (name, np.int64)
            for name in ("uid", "index", "ticket", "seed", "top_k", "num_pages", "published")
        ),
        *((name, np.int64) for name in ("prompt_length", "length", "pending", "computed", "limit")),
        *((name, np.float32) for name in ("inv_temperature", "top_p", "min_p")),
        ("greedy", np.bool_),
    ]
)


class Fork(NamedTuple):
    """`row` goes on from the prompt of row `leader`, on page `last_page`, or on the leader's where
    that is full.
    """

    row: int
    leader: int
    last_page: int = SHARED_PAGE


class SequenceTable:
    """At most `num_rows` sequences of at most `max_tokens` tokens.

    `length` counts a row's tokens, of which the last `pending` are promised: drawn by a step that
    is under way, and not known here yet. `computed` counts those whose K/V is in the cache; the row
    ends at length `limit`. `ticket` tells a row's present sequence from earlier ones.
    Shape: `tokens`, `logprobs`, `versions` [num_rows, max_tokens], prompt first (its log-probs and
    versions are unset); `pages` [num_rows, P]; `stop_ids` [num_rows, S]; all else [num_rows].
    """

    def __init__(self, num_rows: int, max_tokens: int, page_size: int) -> None:
        self.num_rows = num_rows
        self.page_size = page_size
        self.max_tokens = max_tokens
        self.requests: list[Request | None] = [None] * num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        self._tickets = count(1)

        def column(dtype: type, *width: int) -> NDArray[Any]:
            return np.zeros((num_rows, *width), dtype=dtype)

        self.tokens = column(np.int32, max_tokens)
        self.logprobs = column(np.float32, max_tokens)
        self.versions = column(np.int32, max_tokens)
        self.pages = column(np.int64, -(-max_tokens // page_size))
        self.stop_ids = column(np.int32, 1)
        self._state = np.zeros(num_rows, _STATE)
        # numpy copies records field by field
        self._bytes = self._state.view(np.uint8).reshape(num_rows, -1)
        self.num_pages = self._state["num_pages"]
        self.prompt_length = self._state["prompt_length"]
        self.length = self._state["length"]
        self.pending = self._state["pending"]
        self.computed = self._state["computed"]
        self.published = self._state["published"]
        self.limit = self._state["limit"]
        self.ticket = self._state["ticket"]
        self.uid = self._state["uid"]
        self.index = self._state["index"]
        self.seed = self._state["seed"]
        self.inv_temperature = self._state["inv_temperature"]
        self.greedy = self._state["greedy"]
        self.top_k = self._state["top_k"]
        self.top_p = self._state["top_p"]
        self.min_p = self._state["min_p"]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def put(
        self, request: Request, pages: list[int], computed: int, stop_ids: tuple[int, ...]
    ) -> int:
        """Give `request` a row; `pages` already hold K/V of its first `computed` tokens."""
        row = self._free.pop()
        prompt, length = len(request.prompt), request.num_tokens
        self.requests[row] = request
        self.tokens[row, :prompt] = request.prompt
        self.tokens[row, prompt:length] = request.tokens
        self.logprobs[row, prompt:length] = request.logprobs
        self.versions[row, prompt:length] = request.versions
        self.pages[row, : len(pages)] = pages
        self.num_pages[row] = len(pages)
        self.prompt_length[row] = prompt
        self.length[row] = length
        self.pending[row] = 0
        self.computed[row] = computed
        self.published[row] = computed // self.page_size
        self.ticket[row] = next(self._tickets)
        self.limit[row] = min(prompt + request.sampling.max_tokens, self.max_tokens)
        self.uid[row], self.index[row] = request.uid, request.index
        self._put_sampling(row, request, stop_ids)
        return row

    def _put_sampling(self, row: int, request: Request, stop_ids: tuple[int, ...]) -> None:
        sampling = request.sampling
        self.seed[row] = sampling.seed
        self.inv_temperature[row] = np.float32(1) / np.float32(sampling.scored_temperature)
        self.greedy[row] = sampling.temperature == 0
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
        """A row for each of `requests`, which `put_forks` will fill."""
        rows = [self._free.pop() for _ in requests]
        for row, request in zip(rows, requests, strict=True):
            self.requests[row] = request
        return rows

    def put_forks(self, forks: list[Fork]) -> None:
        """Give the reserved rows all that their leaders have, but for pages of their own."""
        if not forks:
            return
        rows, leaders, own = np.array(forks, dtype=np.int64).T
        requests = [request for row in rows.tolist() if (request := self.requests[row]) is not None]
        length, num_pages = self.length[leaders], self.num_pages[leaders]
        width, paged = int(length.max()), own != SHARED_PAGE
        self._bytes[rows] = self._bytes[leaders]
        self.stop_ids[rows] = self.stop_ids[leaders]
        self.tokens[rows, :width] = self.tokens[leaders, :width]
        self.pages[rows, : int(num_pages.max())] = self.pages[leaders, : int(num_pages.max())]
        self.pages[rows[paged], num_pages[paged] - 1] = own[paged]
        self.computed[rows] = length
        self.ticket[rows] = [next(self._tickets) for _ in requests]
        self.uid[rows] = [request.uid for request in requests]
        self.index[rows] = [request.index for request in requests]

    def promise(self, rows: NDArray[np.int64]) -> None:
        """A step that is under way draws one more token for each of `rows`."""
        self.length[rows] += 1
        self.pending[rows] += 1

    def fulfil(
        self,
        rows: NDArray[np.int64],
        tokens: NDArray[np.int64],
        logprobs: NDArray[np.float32],
        version: int,
    ) -> None:
        """The oldest promised token of each of `rows`."""
        at = self.known(rows)
        self.tokens[rows, at] = tokens
        self.logprobs[rows, at] = logprobs
        self.versions[rows, at] = version
        self.pending[rows] -= 1

    def known(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many tokens of each of `rows` are known."""
        return self.length[rows] - self.pending[rows]

    def bases(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """What the keys of the tokens of `rows` are made from."""
        return stream_bases(self.seed[rows], self.uid[rows], self.index[rows])

    def filters(self, rows: NDArray[np.int64]) -> tuple[str, ...]:
        """Those that any of `rows` asks for."""
        return tuple(
            name for name, off in ALL_TOKENS.items() if (self._state[name][rows] != off).any()
        )

    def append_page(self, row: int, page: int) -> None:
        self.pages[row, self.num_pages[row]] = page
        self.num_pages[row] += 1

    def held_pages(self, row: int) -> list[int]:
        return self.held_by([row])[0]

    def held_by(self, rows: list[int]) -> list[list[int]]:
        """The pages of each of `rows`."""
        nums = self.num_pages[rows].tolist()
        tables = self.pages[rows, : max(nums, default=0)].tolist()
        return [pages[:num] for pages, num in zip(tables, nums, strict=True)]

    def last_page(self, row: int) -> int:
        return int(self.pages[row, self.num_pages[row] - 1])

    def take(self, rows: list[int]) -> list[Request]:
        """Free `rows` and return their requests, each with all that is known of its answer."""
        index = np.array(rows, dtype=np.int64)
        first = self.prompt_length[index]
        sizes = self.known(index) - first
        at = np.repeat(index, sizes), np.repeat(first, sizes) + offsets_within(sizes)
        tokens, logprobs, versions = self.tokens[at], self.logprobs[at], self.versions[at]
        self.ticket[index] = 0
        self._free += rows
        taken, ends = [], accumulate(sizes.tolist(), initial=0)
        for row, (start, end) in zip(rows, pairwise(ends), strict=True):
            old = self.requests[row]
            assert old is not None
            self.requests[row] = None
            answer = tokens[start:end], logprobs[start:end], versions[start:end]
            taken.append(Request(old.uid, old.index, old.prompt, old.sampling, *answer))
        return taken
