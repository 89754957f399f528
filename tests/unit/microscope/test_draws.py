"""Which log-probs a replay sees: those that come with a draw, and those that the drawing op makes
of given tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from spmd_rl.kernels import sample_and_score
from spmd_rl.microscope.diagnose.compare import compare
from spmd_rl.microscope.replay.case import ReplayCase, ReplaySequence
from spmd_rl.microscope.replay.engine_pass import OWN_DRAWS, EnginePass
from spmd_rl.microscope.taps.points import Point
from spmd_rl.microscope.taps.taps import HashTap
from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.native.engine import NativeEngine

LOGPROB = Point(3, "logprob")


@pytest.fixture(scope="module")
def drawn(engine: Callable[[], EnginePass]) -> ReplayCase:
    """Samples of the engine itself."""
    path, sequences = engine(), []
    generating = NativeEngine(path.model, path.cfg, path.device)
    generating.sink().commit(0)
    prompt, sampling = (
        np.arange(2, 11, dtype=np.int32),
        SamplingConfig(max_tokens=12, ignore_eos=True),
    )
    for index in range(3):
        generating.submit(Request(3, index, prompt, sampling, seed=5))
    while generating.has_work:
        for one in generating.step().finished:
            sequences.append(
                ReplaySequence(
                    f"3:{one.index}", prompt, one.tokens, sampling, (3, one.index), seed=5
                )
            )
    return ReplayCase(tuple(sequences))


def draw_only(
    logits: Tensor, inv_temperature: Tensor, *rest: Tensor, given=None, **filters
) -> tuple[Tensor, Tensor]:
    """Wrong in the log-prob that comes with a draw, right in that of given tokens."""
    tokens, logprobs = sample_and_score(logits, inv_temperature, *rest, given=given, **filters)
    return tokens, logprobs if given is not None else logprobs + 1


def always(
    logits: Tensor, inv_temperature: Tensor, *rest: Tensor, **filters
) -> tuple[Tensor, Tensor]:
    tokens, logprobs = sample_and_score(logits, inv_temperature, *rest, **filters)
    return tokens, logprobs + 1


def introduced(path: EnginePass, trainer, case: ReplayCase) -> dict[Point, int]:
    found = compare(path, trainer, case).results
    return {one.point: one.num_introduced_rows for one in found if one.status == "introduced"}


def test_the_log_probs_of_its_own_draws_are_counted_and_agree(engine, trainer, drawn) -> None:
    path = engine()
    assert introduced(path, trainer, drawn) == {}
    assert path.facts[OWN_DRAWS] == 3 * 12


def test_control_a_fault_of_drawing_alone_is_found_where_tokens_are_drawn_as_recorded(
    engine, trainer, drawn
) -> None:
    path = engine()
    path.sampler = draw_only
    assert introduced(path, trainer, drawn) == {LOGPROB: 3 * 12}


def test_the_drawing_op_is_seen_where_no_token_is_drawn_as_recorded(engine, trainer, case) -> None:
    path = engine()
    path.sampler = always
    scored = sum(len(one.response) for one in case.sequences)
    assert introduced(path, trainer, case) == {LOGPROB: scored}
    own = path.facts[OWN_DRAWS]
    path.sampler = draw_only
    assert own < scored / 4
    assert introduced(path, trainer, case) == ({LOGPROB: own} if own else {})


def test_none_of_its_own_draws_is_a_count_too(engine, drawn) -> None:
    path = engine()
    path.sampler = lambda logits, *rest, **filters: (logits.argmin(1), torch.zeros(len(logits)))
    path.run(drawn, HashTap(drawn.num_rows))
    assert path.facts[OWN_DRAWS] == 0
