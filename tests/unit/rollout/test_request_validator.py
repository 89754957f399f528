"""Requests that an engine could never serve: each bound, at it and one beyond."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from spmd_rl.errors import ConfigError, DataError
from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.native.request_validator import RequestValidator
from spmd_rl.types.token_data import TokenData

VOCAB_SIZE, CONTEXT, PAGES = 37, 16, 12


@pytest.fixture
def validator(model: Any) -> RequestValidator:
    spec = replace(model.spec, vocab_size=VOCAB_SIZE, max_positions=CONTEXT)
    return RequestValidator(spec, PAGES)


def asked(prompt: list[int], num_tokens: int = 0, **sampling: Any) -> Request:
    cfg = SamplingConfig(**{"max_tokens": 4, **sampling})
    request = Request(3, 0, np.array(prompt, np.int32), cfg)
    if not num_tokens:
        return request
    nothing = np.zeros(num_tokens, np.int32)
    past = TokenData(nothing, nothing.astype(np.float32), nothing)
    return Request(3, 0, request.prompt, cfg, past)


@pytest.mark.parametrize(
    ("taken", "refused", "problem"),
    [
        (asked([36]), asked([37]), "outside the model's vocabulary of 37"),
        (asked([0]), asked([-1]), "outside the model's vocabulary of 37"),
        (asked([1]), asked([]), "has no tokens"),
        (asked([1] * 9), asked([1] * 10), "may need 13 tokens of KV memory"),
        (asked([1] * 9, max_tokens=4), asked([1] * 16), "has 16 tokens, but the model's context"),
        (asked([1], 3), asked([1], 4), "already has all 4 tokens"),
        (asked([1], stop_ids=(36,)), asked([1], stop_ids=(37,)), "stop_ids holds 37"),
    ],
)
def test_a_bound_is_kept(
    validator: RequestValidator, taken: Request, refused: Request, problem: str
) -> None:
    validator.check(taken)
    with pytest.raises((DataError, ConfigError), match=problem):
        validator.check(refused)
