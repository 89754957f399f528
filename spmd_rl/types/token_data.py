"""TokenData: the tokens that follow a prompt, with all that is known of each. numpy only.

It is the one owner of per-token data between the engine and the samples. Whoever cuts, joins or
resumes an answer does so through it, so a further column is one entry of `columns`, which the
engine fills. Shape letters: R tokens, K values of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from spmd_rl.types.columns import concatenate, join_by_name
from spmd_rl.types.kept_sets import NO_SET, set_ends

NO_VERSION = -1  # of a token that no engine drew
NO_TOKENS, NO_LOGPROBS = np.zeros(0, np.int32), np.zeros(0, np.float32)
NO_COLUMNS: dict[str, NDArray[Any]] = {}


class TokenData(msgspec.Struct, frozen=True, array_like=True):
    """Tokens, their log-probs, and the versions of the weights that drew them.

    `kept` are their kept sets, where top-k, top-p or min-p left out others (`kept_sets.py`).
    `columns` are further values by name, in any dtype that crosses between processes. A token that
    no engine drew has a log-prob of 0, the version -1, an empty kept set and zeros in `columns`.
    `prompt_routes` are the rows of `routes.EXPERT_IDS` for the tokens before these, as bytes end to
    end, where the engine recorded them.

    Shape: `tokens`, `logprobs`, `versions` are [R]; `columns` are [R] or [R, K].
    """

    tokens: NDArray[np.int32] = NO_TOKENS
    logprobs: NDArray[np.float32] = NO_LOGPROBS
    versions: NDArray[np.int32] = NO_TOKENS
    kept: bytes = b""
    columns: dict[str, NDArray[Any]] = NO_COLUMNS
    prompt_routes: bytes = b""

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, start: int, stop: int | None = None) -> TokenData:
        """Return the tokens from `start` up to `stop`."""
        part = slice(start, stop)
        return TokenData(
            self.tokens[part],
            self.logprobs[part],
            self.versions[part],
            _cut_sets(self.kept, part),
            {name: column[part] for name, column in self.columns.items()},
            b"" if start else self.prompt_routes,
        )

    @staticmethod
    def observed(tokens: NDArray[np.int32]) -> TokenData:
        """Return tokens that no engine drew."""
        num_tokens = len(tokens)
        return TokenData(
            tokens, np.zeros(num_tokens, np.float32), np.full(num_tokens, NO_VERSION, np.int32)
        )

    @staticmethod
    def join(parts: Sequence[TokenData]) -> TokenData:
        """Return the parts end to end. What comes before them is what comes before the first that
        was drawn.

        Raises: ValueError where a column has another dtype or shape in one part than in another.
        """
        kept = [part.kept or NO_SET * len(part) for part in parts]
        return TokenData(
            concatenate([part.tokens for part in parts], np.int32),
            concatenate([part.logprobs for part in parts], np.float32),
            concatenate([part.versions for part in parts], np.int32),
            b"".join(kept) if any(part.kept for part in parts) else b"",
            join_by_name([part.columns for part in parts], [len(part) for part in parts]),
            next((part.prompt_routes for part in parts if part.prompt_routes), b""),
        )


NO_DATA = TokenData()


def _cut_sets(kept: bytes, part: slice) -> bytes:
    if not kept:
        return b""
    ends = [0, *set_ends(np.frombuffer(kept, np.uint8)).tolist()]
    start, stop, _ = part.indices(len(ends) - 1)
    return kept[ends[start] : ends[max(start, stop)]]
