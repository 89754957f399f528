"""A planted per-token column rides from the engine to the loss and to the samples file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import spmd_rl as rl
from spmd_rl.algo.losses import LossInput
from spmd_rl.data.render.answer_end import AnswerEnd
from spmd_rl.hooks.transcript import Transcript, TranscriptPlace, Turn
from spmd_rl.model.hf import random_weights
from spmd_rl.model.network import CausalLM
from spmd_rl.model.read import read_spec
from spmd_rl.observe.samples_file import samples_as_json_lines
from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.episode_samples import ModelLimits
from spmd_rl.rollout.group_queue import QueuedGroup
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.native.engine import NativeEngine
from spmd_rl.rollout.native.sequence_table import SequenceTable
from spmd_rl.rollout.sampler_file import SamplerState, read_state, write_state
from spmd_rl.types.groups import Group
from spmd_rl.types.samples import Sample
from spmd_rl.types.token_data import TokenData
from tests.dist.train_case import VOCAB
from tests.planted.token_column import NAME, WIDTH, plant, values_of
from tests.samples import Samples, finish

SAMPLING = SamplingConfig(num_samples=3, max_tokens=24, ignore_eos=True, top_p=0.9, top_k=20)
PROMPTS = [rl.Prompt(uid, np.arange(2, 5 + uid, dtype=np.int32)) for uid in range(4)]
REQUESTS = [
    Request(prompt.uid, index, prompt.tokens, SAMPLING, seed=1)
    for prompt in PROMPTS
    for index in range(SAMPLING.num_samples)
]


def new_engine(folder: Path, **options: Any) -> NativeEngine:
    spec = read_spec(folder)
    model = CausalLM(spec)
    model.load_state_dict(dict(random_weights(spec, 0)))
    cfg = NativeEngineConfig(max_batch=6, page_size=8, max_step_tokens=32, **options)
    engine = NativeEngine(model.requires_grad_(False), cfg, torch.device("cpu"))
    engine.sink().commit(0)
    return engine


def check(sample: Sample) -> None:
    column = sample.columns[NAME]
    assert column.dtype == np.int16 and column.shape == (len(sample.tokens), WIDTH)
    drawn = sample.versions >= 0
    np.testing.assert_array_equal(column[drawn], values_of(sample.tokens[drawn]))
    assert not column[~drawn].any()


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, model_folder: Path) -> Samples:
    """Samples that one engine began and another one finished, some of them preempted meanwhile."""
    plant(monkeypatch)
    first, second = new_engine(model_folder), new_engine(model_folder, num_pages=10)
    done = {}
    for request in REQUESTS:
        first.submit(request)
    for _ in range(12):
        done |= {(one.prompt_uid, one.index): one for one in first.step().finished}
    partial = {(one.prompt_uid, one.index): one for one in first.abort()}
    assert any(len(one.tokens) for one in partial.values())
    for one in partial.values():
        if len(one.tokens):
            check(one)
    again = [
        request.resumed(partial[request.uid, request.index])
        for request in REQUESTS
        if (request.uid, request.index) in partial
    ]
    done |= finish(second, again)
    assert second.stats()["num_preemptions"] > 0
    return done


def groups_of(drawn: Samples) -> list[Group]:
    return [
        Group(prompt, [drawn[prompt.uid, i].replace(reward=float(i)) for i in range(3)])
        for prompt in PROMPTS
    ]


def test_it_survives_pauses_checkpoints_and_files(drawn: Samples, tmp_path: Path) -> None:
    for sample in drawn.values():
        check(sample)
    groups = groups_of(drawn)
    entries = [QueuedGroup(group.prompt, 0, group=group) for group in groups[1:]]
    entries.append(QueuedGroup(groups[0].prompt, 0, partial=groups[0].samples))
    write_state(str(tmp_path / "sampler"), SamplerState(1, entries, [], {}))
    for entry in read_state(str(tmp_path / "sampler")).entries:
        for sample in entry.group.samples if entry.group else entry.partial:
            check(sample)
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "step_00001.jsonl").write_text(samples_as_json_lines(groups))
    for group in rl.read_groups(tmp_path, 1):
        for sample in group.samples:
            check(sample)


def test_a_step_without_it_leaves_zeros_not_what_a_row_had_before() -> None:
    table = SequenceTable(1, 16, 8)
    one = np.zeros(1, np.int64)
    column = {NAME: values_of(one)}
    for columns, expected in ((column, values_of(one)), ({}, np.zeros((1, WIDTH), np.int16))):
        row = table.add(REQUESTS[0], [0, 1], 0, ())
        rows = np.array([row])
        table.add_pending(rows)
        table.write_sampled(rows, one, one.astype(np.float32), 0, (), columns)
        (request,) = table.remove([row])
        np.testing.assert_array_equal(request.past.columns[NAME], expected)


def test_what_is_cut_or_observed_keeps_it_in_place(drawn: Samples) -> None:
    sample = drawn[0, 0]
    tool = TokenData.observed(np.array([5, 6, 7], np.int32))
    whole = TokenData.join([sample.data, tool, sample.data])
    episode = sample.with_data(whole)
    check(episode)
    transcript = Transcript(PROMPTS[0])
    transcript.place = TranscriptPlace(0, 0, 1.0)
    transcript.append(Turn(sample.data))
    transcript.observe([5, 6, 7])
    transcript.append(Turn(sample.data))
    check(transcript.sample())
    limits = ModelLimits(len(sample.tokens) + 4, VOCAB)
    cut = limits.fitted(sample.with_data(TokenData.join([sample.data, tool])), 3)
    assert len(cut.tokens) == len(sample.tokens)
    check(cut)
    end = AnswerEnd((9, 8), (), 1000)
    prompt = replace(PROMPTS[0], chat={"messages": []})
    (after,) = end.after([Group(prompt, [sample.replace(status="completed")])])
    check(after.samples[0])


def seen(out: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss that counts the tokens whose column is not theirs."""
    column = out.columns[NAME].to(torch.int64)
    steps = column - column[:, :1] == torch.arange(WIDTH)
    return -out.logprobs, {"total": column.sum(1).float(), "wrong": (~steps.all(1)).float()}


@pytest.mark.parametrize("shards", [1, 3])
def test_it_reaches_the_loss(drawn: Samples, new_trainer: Any, shards: int) -> None:
    groups = groups_of(drawn)
    batch = rl.pack(groups, rl.group_advantage(groups))
    assert not batch.columns[NAME][~batch.mask].any()
    expected = batch.columns[NAME][batch.mask].sum(dtype=np.int64)
    total = 0.0
    for part in batch.shard(shards):
        metrics = new_trainer(minibatches=2, max_tokens=60).train_step(part, seen)
        assert metrics["wrong"] == 0, sorted(metrics)
        total += metrics["total"] * part.mask.sum()
    assert total == pytest.approx(float(expected))
