"""Decoding as CUDA graphs: the same samples as step by step, whatever joins, ends, stops, waits or sleeps."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from spmd_rl.errors import SpmdError
from spmd_rl.kernels import PackedAttention, token_logprobs
from spmd_rl.kernels.flash import flash_takes
from spmd_rl.model.hf import init_weights
from spmd_rl.model.network import CausalLM
from spmd_rl.model.spec import ModelSpec, RopeSpec
from spmd_rl.rollout.engine import EngineConfig, Request, SamplingConfig
from spmd_rl.rollout.native.engine import NativeEngine
from spmd_rl.rollout.native.graphs import DecodeGraphs
from spmd_rl.rollout.native.staged import Staged
from spmd_rl.rollout.native.steps import Drawn, Steps
from spmd_rl.types import Sample

DEVICE = torch.device("cuda")
SPEC = ModelSpec(
    family="qwen3", vocab_size=4096, hidden_size=512, intermediate_size=1536, num_layers=3, num_heads=8, num_kv_heads=4,
    head_dim=64, max_positions=1024, rms_eps=1e-6, rope=RopeSpec(1e6), tie_embeddings=True, qkv_bias=False,
    out_bias=False, mlp_bias=False, qk_norm=True, init_std=0.06,
)  # fmt: skip
Samples = dict[tuple[int, int], Sample]


@pytest.fixture(autouse=True)
def _needs_flash() -> None:
    if not flash_takes(64, torch.bfloat16, DEVICE):
        pytest.skip("needs FlashAttention-4 on a Hopper GPU")


@pytest.fixture(scope="module")
def model() -> CausalLM:
    model = CausalLM(SPEC)
    init_weights(model, SPEC, 0)
    return model.to(DEVICE, torch.bfloat16).requires_grad_(False)


def workload() -> list[Request]:
    """Answers of 1 to 200 tokens, some cut short by a common token, some filtered, some greedy."""
    rng = np.random.default_rng(1)
    stem = rng.integers(2, SPEC.vocab_size, 400).astype(np.int32)
    kinds = [
        {},
        {"stop_ids": tuple(range(100, 160))},
        {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
        {"temperature": 0.0},
        {"temperature": 1.4, "min_p": 0.01, "stop_ids": tuple(range(100))},
    ]
    return [
        Request(
            uid,
            index,
            stem[: 1 + 37 * uid % 300],
            SamplingConfig(max_tokens=int(rng.integers(1, 200)), seed=3, ignore_eos=True, **kinds[uid % len(kinds)]),
        )
        for uid in range(12)
        for index in range(4)
    ]


def new_engine(model: CausalLM, **cfg: object) -> NativeEngine:
    settings = {"max_batch": 24, "page_size": 128, "max_step_tokens": 256, "num_pages": 200} | cfg
    engine = NativeEngine(model, EngineConfig(dtype="bfloat16", **settings), DEVICE)
    engine.new_version(0)
    return engine


def finish(engine: NativeEngine, requests: list[Request]) -> Samples:
    for request in requests:
        engine.submit(request)
    samples = {}
    while engine.has_work:
        samples |= {(sample.prompt_uid, sample.index): sample for sample in engine.step().finished}
    return samples


@pytest.fixture(scope="module")
def alone(model: CausalLM) -> Samples:
    """Every sample decoded step by step, in batches of two."""
    return finish(new_engine(model, cuda_graphs=False, max_batch=2), workload())


def unequal(samples: Samples, expected: Samples) -> int:
    assert samples.keys() == expected.keys()
    return sum(
        sample.tokens.tobytes() != expected[name].tokens.tobytes()
        or sample.logprobs.tobytes() != expected[name].logprobs.tobytes()
        or sample.finish != expected[name].finish
        for name, sample in samples.items()
    )


@pytest.mark.parametrize(
    "cfg",
    [
        *({}, {"max_batch": 64}, {"max_batch": 5, "max_step_tokens": 33}),
        *({"page_size": 16, "num_pages": 400}, {"page_size": 1, "num_pages": 6400}),
    ],
    ids=["usual", "all at once", "few at a time", "small pages", "pages of one token"],
)
def test_graphs_give_the_samples_of_single_steps(model: CausalLM, alone: Samples, cfg: dict) -> None:
    engine = new_engine(model, **cfg)
    assert unequal(finish(engine, workload()), alone) == 0
    assert {sample.finish for sample in alone.values()} == {"stop", "length"}
    assert engine.stats()["num_graphs"] > 2


def test_an_engine_let_go_of_frees_its_memory(model: CausalLM) -> None:
    """After another one, since importing and compiling kernels leaves cycles with the frames that called for it."""
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
    """The same samples from graphs and step by step, the trainer's log-probs, and not the samples without splits."""
    split, requests = 128, workload()
    samples = finish(new_engine(model, attention_split=split), requests)
    assert (
        unequal(samples, finish(new_engine(model, attention_split=split, cuda_graphs=False, max_batch=2), requests))
        == 0
    )
    assert unequal(samples, alone) > 0
    for request in requests:
        sample = samples[request.uid, request.index]
        tokens = torch.from_numpy(np.concatenate([request.prompt, sample.tokens])).long().to(DEVICE)
        attend = PackedAttention(np.array([len(tokens)]), num_heads=8, num_kv_heads=4, device=DEVICE, split=split)
        scored = torch.arange(len(request.prompt) - 1, len(tokens) - 1, device=DEVICE)
        logits = model(tokens, torch.arange(len(tokens), device=DEVICE), attend, scored)
        inverse = torch.full((len(scored),), np.float32(1) / np.float32(sample.temperature), device=DEVICE)
        logprobs, _ = token_logprobs(logits, tokens[scored + 1], inverse)
        assert logprobs.cpu().numpy().tobytes() == sample.logprobs.tobytes()


def test_preemption_changes_nothing(model: CausalLM, alone: Samples) -> None:
    engine = new_engine(model, page_size=16, num_pages=70, prefix_cache=False)
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
    """Rows and tokens that a recorded step has room for get `token`; returns how many, of each decoding step and of
    each upload of prompts."""
    launch, upload = DecodeGraphs.launch, Staged.upload
    of_decoding: list[int] = []
    of_prompts: list[int] = []

    def launches(graphs: DecodeGraphs, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        graphs._newest[-1] = token
        of_decoding.append(min(size for size in graphs._sizes if size >= len(rows)) - len(rows))
        return launch(graphs, rows)

    def uploads(staged: Staged, arrays: dict[str, np.ndarray], padding: dict[str, float]) -> None:
        if "tokens" in arrays:
            of_prompts.append(len(staged.tensors["tokens"]) - len(arrays["tokens"]))
            padding = padding | {"tokens": token}
        upload(staged, arrays, padding)

    monkeypatch.setattr(DecodeGraphs, "launch", launches)
    monkeypatch.setattr(Staged, "upload", uploads)
    return of_decoding, of_prompts


def test_what_fills_a_step_up_may_be_nan(model: CausalLM, alone: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    used = [sample.tokens for sample in alone.values()] + [request.prompt for request in workload()]
    unused = int(np.setdiff1d(np.arange(SPEC.vocab_size), np.concatenate(used))[0])
    of_decoding, of_prompts = fill_up_with(unused, monkeypatch)
    engine = new_engine(poisoned(model, unused))
    assert unequal(finish(engine, workload()), alone) == 0
    assert sum(count > 0 for count in of_decoding) > 20
    assert sum(count > 0 for count in of_prompts) > 3
    torch.cuda.synchronize()
    assert engine._steps._decode._for_host.logprobs.isnan().any()  # of rows that nobody has


def test_control_a_sequence_may_not_be_nan(model: CausalLM, alone: Samples) -> None:
    longest = max(alone.values(), key=lambda sample: len(sample.tokens))
    with pytest.raises(SpmdError, match="NaN logits"):
        finish(new_engine(poisoned(model, int(longest.tokens[10]))), workload())


def test_graphs_outlive_a_sleep(model: CausalLM, alone: Samples) -> None:
    """The memory goes and comes back at the same address, with other content; requests in flight go on."""
    engine = new_engine(model)
    first = finish(engine, workload())
    recorded, free = engine.stats()["num_graphs"], torch.cuda.mem_get_info()[0]
    for request in workload():
        engine.submit(request)
    samples: Samples = {}
    for _ in range(20):
        samples |= {(s.prompt_uid, s.index): s for s in engine.step().finished}
    engine.sleep()
    kv_bytes = 2 * 3 * 200 * 128 * 4 * 64 * 2
    assert torch.cuda.mem_get_info()[0] - free >= kv_bytes - (4 << 20)
    engine.wake()
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


def test_control_stale_newest_token_is_seen(model: CausalLM, alone: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the tokens that prompts' steps drew, the first replay reads what an earlier row left there."""
    monkeypatch.setattr("spmd_rl.rollout.native.graphs.DecodeGraphs.remember", lambda self, rows, tokens: None)
    assert unequal(finish(new_engine(model), workload()), alone) > 0


@contextmanager
def waiting_raises() -> Iterator[None]:
    """torch refuses to copy to the host, or to wait for a stream; waits for events it does not see."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def decoding(model: CausalLM, num_rows: int, **cfg: object) -> NativeEngine:
    """An engine in the middle of so many answers, its graphs recorded."""
    engine, rng = new_engine(model, page_size=16, num_pages=400, **cfg), np.random.default_rng(4)
    sampling = SamplingConfig(max_tokens=150, seed=3, ignore_eos=True)
    for uid in range(num_rows):
        engine.submit(Request(uid, 0, rng.integers(2, SPEC.vocab_size, 40).astype(np.int32), sampling))
    for _ in range(20):
        progress = engine.step()
    assert len(progress.tokens) == num_rows
    return engine


def test_decoding_steps_do_not_synchronize(model: CausalLM) -> None:
    """Over the borders of pages too, where the batch is uploaded again."""
    num_rows, num_steps = 20, 40
    engine = decoding(model, num_rows)
    recorded = engine.stats()["num_graphs"]
    with waiting_raises():
        drawn = [len(engine.step().tokens) for _ in range(num_steps)]
    assert drawn == [num_rows] * num_steps
    assert engine.stats()["num_graphs"] == recorded


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_a_step_waits_for_the_one_before(model: CausalLM, cuda_graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an event; without graphs, for what it has just launched: the control."""
    engine, launch, arrays = decoding(model, 3, cuda_graphs=cuda_graphs), Steps.launch, Drawn.arrays
    launched: list[Drawn] = []
    waited_for_newest: list[bool] = []

    def launches(steps: Steps, *plan: object) -> Drawn:
        launched.append(launch(steps, *plan))
        return launched[-1]

    def waits(drawn: Drawn) -> tuple[np.ndarray, np.ndarray]:
        waited_for_newest.append(drawn is launched[-1])
        return arrays(drawn)

    monkeypatch.setattr(Steps, "launch", launches)
    monkeypatch.setattr(Drawn, "arrays", waits)
    for _ in range(10):
        assert len(engine.step().tokens) == 3
    assert waited_for_newest == [not cuda_graphs] * 10


def test_control_a_wait_in_a_step_is_seen(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    one, engine, launch = torch.ones(1, device=DEVICE), decoding(model, 3), DecodeGraphs.launch

    def waits(graphs: DecodeGraphs, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        assert one.item() == 1
        return launch(graphs, rows)

    with waiting_raises(), pytest.raises(RuntimeError, match="synchronizing"):
        one.item()
    monkeypatch.setattr(DecodeGraphs, "launch", waits)
    with waiting_raises(), pytest.raises(RuntimeError, match="synchronizing"):
        engine.step()
    assert one.item() == 1
