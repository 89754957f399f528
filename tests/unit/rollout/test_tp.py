"""Engines that share a model: the samples of one engine that has all of it, whatever is asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from spmd_rl.kernels import sample_and_score
from spmd_rl.model.hf import random_weights
from spmd_rl.model.network import CausalLM
from spmd_rl.model.parts.part import vocab_part_rows
from spmd_rl.rollout.engine import Request, StepOutput
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.native.engine import NativeEngine
from spmd_rl.rollout.native.tp.follower import TpFollower
from spmd_rl.rollout.native.tp.head_draw import Sampler
from spmd_rl.rollout.native.tp.leader import TpLeader
from spmd_rl.types.samples import Sample
from tests.samples import Samples
from tests.shared_ranks import (
    ThreadExchange,
    on_ranks,
    part_of_model,
    parts,
    sum_neighbours,
)
from tests.unit.rollout.conftest import _spec
from tests.unit.rollout.test_exact import (
    FEATURES,
    TIGHT,
    TOGETHER,
    play,
    unequal,
    workload,
)

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Sinks:
    engines: list[NativeEngine]

    def commit(self, version: int) -> None:
        for engine in self.engines:
            engine.sink().commit(version)


class Together:
    """The engines of all ranks, as the turns of a shard drive them: the first one's answers."""

    def __init__(self, engines: list[NativeEngine]) -> None:
        self.engines = engines
        self._first = TpLeader(engines[0])
        self._others = [TpFollower(engine) for engine in engines[1:]]

    @property
    def has_work(self) -> bool:
        return self._first.has_work

    def submit(self, request: Request) -> None:
        self._first.submit(request)

    def abort(self, uid: int | None = None, index: int | None = None) -> list[Sample]:
        return self._first.abort(uid, index)

    def step(self) -> StepOutput:
        news = self._first.news(True)
        for other in self._others:
            other.follow(news)
        ranks = [self._first, *self._others]
        return on_ranks(lambda rank: ranks[rank].step(), len(ranks))[0]

    def sink(self) -> Sinks:
        return Sinks(self.engines)

    def stats(self) -> dict[str, int]:
        first, *others = [engine.stats() for engine in self.engines]
        assert all(one == first for one in others)
        return first


def weights_and_model(row_shards: int, family: str, heads: tuple[int, int]) -> Any:
    spec = replace(_spec(family, *heads), row_shards=row_shards)
    weights = dict(random_weights(spec, 0))
    model = CausalLM(spec)
    model.load_state_dict(weights)
    return weights, model.requires_grad_(False)


def together(
    model: CausalLM,
    weights: dict[str, Tensor],
    num_ranks: int,
    add: Callable[[list[Tensor]], Tensor] = sum_neighbours,
    is_recordable: bool = False,
    sampler: Sampler = sample_and_score,
    **cfg: Any,
) -> Together:
    config = NativeEngineConfig(**{"max_batch": 10, "max_step_tokens": 64, **cfg})
    of_ranks = parts(num_ranks, add, is_recordable)

    def engine(rank: int) -> NativeEngine:
        own = part_of_model(model.spec, weights, of_ranks[rank])
        return NativeEngine(own, config, CPU, sampler=sampler)

    engines = Together(on_ranks(engine, num_ranks))
    engines.sink().commit(0)
    return engines


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_any_schedule_gives_the_bits_of_one_engine(
    new_engine: Any, mismatched_tokens: Any, num_ranks: int
) -> None:
    """With filters, forks, aborts, preemptions and retractions; with a head of keys for two."""
    weights, model = weights_and_model(4, "qwen3", (4, 2))
    alone: Samples = {}
    for request in workload():
        engine = new_engine(model, max_batch=1, prefix_cache=False)
        engine.submit(request)
        while engine.has_work:
            alone |= {(one.prompt_uid, one.index): one for one in engine.step().finished}
    assert mismatched_tokens(model, workload(), alone) == 0
    seen: Counter[str] = Counter()

    for schedule in (TIGHT, TOGETHER):
        engines = together(model, weights, num_ranks, **schedule.cfg)
        assert unequal(play(engines, schedule), alone) == 0
        seen.update(engines.stats())
    assert all(seen[feature] for feature in FEATURES), f"a feature was not exercised: {seen}"


@pytest.mark.parametrize(("family", "heads"), [("qwen2", (6, 1)), ("llama", (4, 4))])
def test_logprobs_are_the_training_forwards(
    mismatched_tokens: Any, finish: Any, family: str, heads: tuple[int, int]
) -> None:
    weights, model = weights_and_model(2, family, heads)
    samples = finish(together(model, weights, 2), workload())
    assert mismatched_tokens(model, workload(), samples) == 0


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of a row that ranks gave each other, at each exchange of columns."""
    seen: list[int] = []
    gather = ThreadExchange.gather_columns

    def seeing(self: ThreadExchange, own: Tensor) -> Tensor:
        seen.append(own[0].nbytes)
        return gather(self, own)

    monkeypatch.setattr(ThreadExchange, "gather_columns", seeing)
    return seen


def test_ranks_give_each_other_a_few_words_of_a_row(finish: Any, gathered: list[int]) -> None:
    """Filters take whole rows, and so does another sampler, in place of the engine's own."""
    weights, model = weights_and_model(2, "qwen3", (4, 2))
    plain, filtered = workload()[:4], workload()[4:6]
    whole = 4 * vocab_part_rows(model.spec, 2)
    for words, requests, sampler in (
        ({16, 4 * 8 // 2}, plain, sample_and_score),
        ({whole}, filtered, sample_and_score),
        ({whole}, plain, lambda *given, **how: sample_and_score(*given, **how)),
    ):
        engines = together(model, weights, 2, sampler=sampler)
        gathered.clear()
        finish(engines, requests)
        assert set(gathered) == words


def test_sums_in_another_order_are_seen(mismatched_tokens: Any, finish: Any) -> None:
    """Negative control."""

    def in_order(of_ranks: list[Tensor]) -> Tensor:
        return ((of_ranks[0] + of_ranks[1]) + of_ranks[2]) + of_ranks[3]

    weights, model = weights_and_model(4, "qwen3", (4, 2))
    samples = finish(together(model, weights, 4, in_order), workload())
    assert mismatched_tokens(model, workload(), samples) > 0


def test_a_trainer_that_sums_in_fewer_parts_is_seen(mismatched_tokens: Any, finish: Any) -> None:
    """Negative control."""
    weights, model = weights_and_model(4, "qwen3", (4, 2))
    samples = finish(together(model, weights, 2), workload())
    _, other = weights_and_model(2, "qwen3", (4, 2))
    assert mismatched_tokens(model, workload(), samples) == 0
    assert mismatched_tokens(other, workload(), samples) > 0
