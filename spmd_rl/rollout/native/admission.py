"""Which requests an engine refuses when they come, because it could never serve them."""

from __future__ import annotations

from spmd_rl.errors import DataError
from spmd_rl.model.spec import ModelSpec
from spmd_rl.rollout.engine import Request, check_stop_ids


class Admission:
    """Compares requests with the model and with the `room` that the pages have, in tokens."""

    def __init__(self, spec: ModelSpec, room: int) -> None:
        self._spec = spec
        self._room = room
        self._newest: Request | None = None  # among those whose prompt and sampling were checked

    def check(self, request: Request) -> None:
        """Raises: DataError, or ConfigError where its sampling is at fault."""
        newest = self._newest  # the samples of one prompt come one after the other
        if (
            newest is None
            or request.prompt is not newest.prompt
            or request.sampling is not newest.sampling
        ):
            self._check_prompt(request)
            check_stop_ids(request.sampling, self._spec.vocab_size)
            self._newest = request
        length = len(request.prompt)
        limit = min(length + request.sampling.max_tokens, self._spec.max_positions)
        if request.num_tokens >= limit:
            problem = (
                f"sample {request.index} already has all {limit - length} tokens that it may have"
            )
            raise DataError(f"prompt {request.uid}", problem)
        if limit - 1 > self._room:
            problem = f"and its answer may need {limit - 1} tokens of KV memory; the pages hold {self._room}"
            raise DataError(f"prompt {request.uid}", problem)

    def _check_prompt(self, request: Request) -> None:
        where, length, context = (
            f"prompt {request.uid}",
            len(request.prompt),
            self._spec.max_positions,
        )
        if not length:
            raise DataError(where, "has no tokens")
        if length >= context:
            raise DataError(
                where,
                f"has {length} tokens, but the model's context is {context} including the answer",
            )
        if request.prompt.min() < 0 or request.prompt.max() >= self._spec.vocab_size:
            raise DataError(
                where, f"has token ids outside the model's vocabulary of {self._spec.vocab_size}"
            )
