"""Decoding as CUDA graphs: the same samples as step by step, whatever joins, ends, stops, waits or
sleeps.
"""

from __future__ import annotations

import gc
import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from spmd_rl.errors import SpmdError
from spmd_rl.kernels import PackedAttention, token_logprobs
from spmd_rl.model.network import CausalLM
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.native.decode_graphs import DecodeGraphs
from spmd_rl.rollout.native.graph_inputs import GraphInputs
from spmd_rl.rollout.native.sampled_tokens import SampledOnDevice
from spmd_rl.types.kept_sets import decode_sets
from tests.gpu.rollout.graph_case import (
    DEVICE,
    SPEC,
    USUAL,
    inverse_temperatures,
    new_engine,
    new_model,
    unequal,
    workload,
)
from tests.samples import Samples, finish, words_of


@pytest.mark.parametrize(
    "cfg",
    [
        USUAL,
        replace(USUAL, max_batch=64),
        replace(USUAL, max_batch=5, max_step_tokens=33),
        replace(USUAL, page_size=16, num_pages=400),
        replace(USUAL, page_size=1, num_pages=6400),
    ],
    ids=["usual", "all at once", "few at a time", "small pages", "pages of one token"],
)
def test_graphs_give_the_samples_of_single_steps(
    model: CausalLM, alone: Samples, cfg: NativeEngineConfig
) -> None:
    engine = new_engine(model, cfg)
    assert unequal(finish(engine, workload()), alone) == 0
    assert {sample.status for sample in alone.values()} == {"completed", "truncated"}
    assert engine.stats()["num_graphs"] > 2


def test_an_engine_let_go_of_frees_its_memory() -> None:
    """After another one, since importing and compiling kernels leaves cycles with the frames that
    called for it. The model is its own: what other tests keep of theirs is not counted.
    """
    model = new_model()
    finish(new_engine(model), workload()[:4])
    gc.collect()
    before = torch.cuda.memory_allocated()
    gc.disable()
    try:
        engine = new_engine(model)
        finish(engine, workload()[:4])
        during = torch.cuda.memory_allocated()
        del engine
        assert torch.cuda.memory_allocated() - before < (during - before) / 100
    finally:
        gc.enable()


def test_attention_in_splits(model: CausalLM, alone: Samples) -> None:
    """The same samples from graphs and step by step, the trainer's log-probs, and not the samples
    without splits.
    """
    split, requests = 128, workload()
    cfg = replace(USUAL, attention_split=split)
    samples = finish(new_engine(model, cfg), requests)
    stepwise = new_engine(model, replace(cfg, cuda_graphs=False, max_batch=2))
    assert unequal(samples, finish(stepwise, requests)) == 0
    assert unequal(samples, alone) > 0
    for request in requests:
        sample = samples[request.uid, request.index]
        tokens = torch.from_numpy(np.concatenate([request.prompt, sample.tokens])).long().to(DEVICE)
        attend = PackedAttention(np.array([len(tokens)]), device=DEVICE, split=split)
        scored = torch.arange(len(request.prompt) - 1, len(tokens) - 1, device=DEVICE)
        logits = model(tokens, torch.arange(len(tokens), device=DEVICE), attend, scored)
        inverse = inverse_temperatures(sample)
        words = words_of([sample], SPEC.vocab_size, DEVICE)
        logprobs, _ = token_logprobs(logits, tokens[scored + 1], inverse, words)
        assert logprobs.cpu().numpy().tobytes() == sample.logprobs.tobytes()


def test_filtered_samples_have_the_log_probs_of_a_training_forward_over_their_sets(
    model: CausalLM, alone: Samples
) -> None:
    """Most are small and encoded on the device, and some leave it as words."""
    requests = [request for request in workload() if request.sampling.replays]
    sizes, num_unmasked = [], 0
    for request in requests:
        sample = alone[request.uid, request.index]
        tokens = torch.from_numpy(np.concatenate([request.prompt, sample.tokens])).long().to(DEVICE)
        attend = PackedAttention(np.array([len(tokens)]), device=DEVICE)
        scored = torch.arange(len(request.prompt) - 1, len(tokens) - 1, device=DEVICE)
        logits = model(tokens, torch.arange(len(tokens), device=DEVICE), attend, scored)
        inverse = inverse_temperatures(sample)
        inputs = logits, tokens[scored + 1], inverse
        logprobs, _ = token_logprobs(*inputs, words_of([sample], SPEC.vocab_size, DEVICE))
        assert logprobs.cpu().numpy().tobytes() == sample.logprobs.tobytes()
        num_unmasked += int((token_logprobs(*inputs)[0] == logprobs).sum())
        sizes += decode_sets(np.frombuffer(sample.kept, np.uint8))[0].tolist()
    assert len(sizes) > 500
    assert num_unmasked < len(sizes) / 10
    assert 0 < sum(size > SPEC.vocab_size // 8 for size in sizes) < len(sizes)


def test_preemption_changes_nothing(model: CausalLM, alone: Samples) -> None:
    engine = new_engine(model, replace(USUAL, page_size=16, num_pages=70, prefix_cache=False))
    assert unequal(finish(engine, workload()), alone) == 0
    assert engine.stats()["num_preemptions"] > 0


def poisoned(model: CausalLM, token: int) -> CausalLM:
    """`model`, but that NaN stands for `token` where it is read; it is drawn as before."""
    other, given = CausalLM(replace(SPEC, tie_embeddings=False)), dict(model.named_parameters())
    other.to(DEVICE, torch.bfloat16).requires_grad_(False)
    for name, one in other.named_parameters():
        one.copy_(given.get(name, model.model.embed_tokens.weight))
    other.model.embed_tokens.weight[token] = torch.nan
    return other


def fill_up_with(token: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """Rows and tokens that a recorded step has room for get `token`; returns how many, of each
    decoding step and of each upload of prompts."""
    launch, upload = DecodeGraphs.launch, GraphInputs.upload
    of_decoding: list[int] = []
    of_prompts: list[int] = []

    def launches(graphs: DecodeGraphs, rows: np.ndarray, *others: Any) -> SampledOnDevice:
        graphs._newest_tokens[-1] = token
        of_decoding.append(
            min(size for size in graphs._batch_sizes if size >= len(rows)) - len(rows)
        )
        return launch(graphs, rows, *others)

    def uploads(
        staged: GraphInputs, arrays: dict[str, np.ndarray], padding: dict[str, float]
    ) -> None:
        if "tokens" in arrays:
            of_prompts.append(len(staged.tensors["tokens"]) - len(arrays["tokens"]))
            padding = padding | {"tokens": token}
        upload(staged, arrays, padding)

    monkeypatch.setattr(DecodeGraphs, "launch", launches)
    monkeypatch.setattr(GraphInputs, "upload", uploads)
    return of_decoding, of_prompts


def test_what_fills_a_step_up_may_be_nan(
    model: CausalLM, alone: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = [sample.tokens for sample in alone.values()] + [request.prompt for request in workload()]
    unused = int(np.setdiff1d(np.arange(SPEC.vocab_size), np.concatenate(used))[0])
    of_decoding, of_prompts = fill_up_with(unused, monkeypatch)
    engine = new_engine(poisoned(model, unused))
    assert unequal(finish(engine, workload()), alone) == 0
    assert sum(count > 0 for count in of_decoding) > 20
    assert sum(count > 0 for count in of_prompts) > 3
    torch.cuda.synchronize()
    graphs = engine._runner._decode_graphs
    assert graphs is not None
    assert graphs._output_buffers.logprobs.isnan().any()  # of rows that nobody has


def test_control_a_sequence_may_not_be_nan(model: CausalLM, alone: Samples) -> None:
    longest = max(alone.values(), key=lambda sample: len(sample.tokens))
    with pytest.raises(SpmdError, match="NaN logits"):
        finish(new_engine(poisoned(model, int(longest.tokens[10]))), workload())


def test_graphs_outlive_a_sleep(model: CausalLM, alone: Samples) -> None:
    """The memory goes and comes back at the same address, with other content; requests in flight go
    on.
    """
    engine = new_engine(model)
    first = finish(engine, workload())
    recorded = engine.stats()["num_graphs"]
    for request in workload():
        engine.submit(request)
    samples: Samples = {}
    for _ in range(20):
        samples |= {(s.prompt_uid, s.index): s for s in engine.step().finished}
    gone = []
    for _ in range(5):  # other processes may take and give memory meanwhile
        free = torch.cuda.mem_get_info()[0]
        engine.sleep()
        gone.append(torch.cuda.mem_get_info()[0] - free)
        engine.wake()
    kv_bytes = 2 * 3 * 200 * 128 * 4 * 64 * 2
    assert statistics.median(gone) >= kv_bytes - (4 << 20)
    samples |= finish(engine, [])
    assert unequal(first, alone) == unequal(samples, alone) == 0
    assert engine.stats()["num_graphs"] == recorded


def test_abort_and_resume_between_steps(model: CausalLM, alone: Samples) -> None:
    engine, requests = new_engine(model), workload()
    for request in requests:
        engine.submit(request)
    samples: Samples = {}
    for _ in range(30):
        samples |= {(s.prompt_uid, s.index): s for s in engine.step().finished}
    partial = {(s.prompt_uid, s.index): s for s in engine.abort()}
    assert partial
    assert not engine.has_work
    resumed = [r.resumed(partial[r.uid, r.index]) for r in requests if (r.uid, r.index) in partial]
    assert unequal(samples | finish(engine, resumed), alone) == 0


def test_control_stale_newest_token_is_seen(
    model: CausalLM, alone: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the tokens that prompts' steps drew, the first replay reads what an earlier row left
    there.
    """
    monkeypatch.setattr(
        "spmd_rl.rollout.native.decode_graphs.DecodeGraphs.set_newest_tokens",
        lambda self, rows, tokens: None,
    )
    assert unequal(finish(new_engine(model), workload()), alone) > 0
