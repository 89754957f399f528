"""Validation of new requests: the engine refuses those that it could never serve."""

from __future__ import annotations

from spmd_rl.errors import DataError
from spmd_rl.model.layers.route_shape import RouteShape
from spmd_rl.model.spec import ModelSpec
from spmd_rl.rollout.engine import Request, check_stop_ids
from spmd_rl.types.prompts import prompt_name


class RequestValidator:
    """Checks requests against the model, and against the tokens that all pages can hold."""

    def __init__(self, spec: ModelSpec, max_kv_tokens: int) -> None:
        self._spec = spec
        self._max_kv_tokens = max_kv_tokens
        self._last_valid: Request | None = None  # its prompt and sampling passed

    def check(self, request: Request) -> None:
        """Raises: DataError, or ConfigError if its sampling is at fault."""
        last = self._last_valid
        # Samples of one prompt follow each other, so the prompt is checked once for all of them.
        if (
            last is None
            or request.prompt is not last.prompt
            or request.sampling is not last.sampling
        ):
            self._check_prompt(request)
            check_stop_ids(request.sampling, self._spec.vocab_size)
            if request.sampling.replay_routes:
                RouteShape.required(self._spec)
            self._last_valid = request
        prompt_length = len(request.prompt)
        max_length = min(prompt_length + request.sampling.max_tokens, self._spec.max_positions)
        if request.num_tokens >= max_length:
            raise DataError(
                prompt_name(request.uid),
                f"sample {request.index} already has all {max_length - prompt_length} tokens "
                "that it may have",
            )
        if max_length - 1 > self._max_kv_tokens:
            raise DataError(
                prompt_name(request.uid),
                f"and its answer may need {max_length - 1} tokens of KV memory; "
                f"the pages hold {self._max_kv_tokens}",
            )

    def _check_prompt(self, request: Request) -> None:
        where, length = prompt_name(request.uid), len(request.prompt)
        context, vocab_size = self._spec.max_positions, self._spec.vocab_size
        if not length:
            raise DataError(where, "has no tokens")
        if length >= context:
            raise DataError(
                where,
                f"has {length} tokens, but the model's context is {context} including the answer",
            )
        if request.prompt.min() < 0 or request.prompt.max() >= vocab_size:
            raise DataError(where, f"has token ids outside the model's vocabulary of {vocab_size}")
