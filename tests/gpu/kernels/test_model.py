"""Whole models in bf16 on a GPU: decode-time log-probs equal the training forward's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from spmd_rl.kernels import KvCache, PackedAttention, PagedAttention, token_logprobs
from spmd_rl.kernels.attention.flash import flash_supports
from spmd_rl.model.hf import random_weights
from spmd_rl.model.network import CausalLM
from spmd_rl.model.read import read_spec
from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.native.engine import NativeEngine
from spmd_rl.rollout.native.sequence_table import SequenceTable
from tests.gpu.kernels.gradients import gradient
from tests.samples import Samples, finish, words_of
from tests.specs import dense_spec, kv_layers, with_experts, with_layers

DEVICE = torch.device("cuda")
USUAL = NativeEngineConfig(dtype="bfloat16")
QWEN3 = dense_spec(
    "qwen3",
    vocab=4096,
    hidden=512,
    inner=1536,
    layers=3,
    heads=(8, 4, 64),
    positions=2048,
    theta=1e6,
    tie_embeddings=True,
    qk_norm=True,
    init_std=0.06,
)
QWEN2 = with_layers(
    replace(QWEN3, family="qwen2", vocab_size=5003),
    head_dim=128,
    num_heads=6,
    num_kv_heads=2,
    qkv_bias=True,
    qk_norm=False,
)
LARGE = "heads of 256"
SPECS = {
    "qwen3": QWEN3,
    "qwen2": replace(QWEN2, tie_embeddings=False),
    "experts": with_experts(QWEN3, 32, 4, 192),
    # head sizes that FlashAttention does not take
    "heads of 80": with_layers(QWEN3, head_dim=80),
    LARGE: with_layers(QWEN2, head_dim=256, num_heads=4, num_kv_heads=1),
}


@pytest.fixture(autouse=True)
def _needs_flash() -> None:
    if not flash_supports(128, torch.bfloat16, DEVICE):
        pytest.skip("needs FlashAttention-4 on a Hopper GPU")


def build(name: str) -> CausalLM:
    model = CausalLM(SPECS[name])
    model.load_state_dict(dict(random_weights(SPECS[name], 0)))
    return model.to(DEVICE, torch.bfloat16)


def requests(vocab: int) -> list[Request]:
    rng = np.random.default_rng(0)
    stem = rng.integers(2, vocab, 700)
    prompts = [
        stem[:3],
        stem[:17],
        stem[:300],
        stem[:129],
        np.concatenate([stem[:200], rng.integers(2, vocab, 41)]),
    ]
    shapes = [
        SamplingConfig(max_tokens=90, ignore_eos=True),
        SamplingConfig(max_tokens=64, temperature=0.7, ignore_eos=True),
        SamplingConfig(max_tokens=33, temperature=1.3, top_k=50, top_p=0.9, ignore_eos=True),
        SamplingConfig(max_tokens=20, temperature=0.0, ignore_eos=True),
        SamplingConfig(max_tokens=70, ignore_eos=True),
    ]
    return [
        Request(uid, index, prompt.astype(np.int32), sampling, seed=5 + (uid > 2))
        for uid, (prompt, sampling) in enumerate(zip(prompts, shapes, strict=True))
        for index in range(6)
    ]


def generate(
    model: CausalLM, wanted: list[Request], cfg: NativeEngineConfig = USUAL
) -> tuple[Samples, dict[str, int]]:
    engine = NativeEngine(model, cfg, DEVICE)
    engine.sink().commit(0)
    return finish(engine, wanted), engine.stats()


def score(model: CausalLM, wanted: list[Request], samples: Samples) -> tuple[Tensor, Tensor]:
    """Return the log-probs of all response tokens: packed as a trainer's, and as recorded.

    Those of filtered requests are over the sets that the filters kept.
    """
    pairs = [(request, samples[request.uid, request.index]) for request in wanted]
    tokens = [
        np.concatenate([request.prompt, sample.tokens]).astype(np.int64)
        for request, sample in pairs
    ]
    lengths = np.array([len(one) for one in tokens], dtype=np.int32)
    ends = np.cumsum(lengths)
    spec = model.spec
    attend = PackedAttention(lengths, device=DEVICE)
    rows = [
        np.arange(end - len(s.tokens) - 1, end - 1) for end, (_, s) in zip(ends, pairs, strict=True)
    ]
    warm = np.concatenate(
        [np.full(len(s.tokens), s.temperature, dtype=np.float32) for _, s in pairs]
    )

    def tensor(parts: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(DEVICE)

    logits = model(tensor(tokens), tensor([np.arange(n) for n in lengths]), attend, tensor(rows))
    targets = tensor([s.tokens.astype(np.int64) for _, s in pairs])
    words = words_of([sample for _, sample in pairs], spec.vocab_size, DEVICE)
    scored, _ = token_logprobs(logits, targets, (1 / torch.from_numpy(warm)).to(DEVICE), words)
    return scored, tensor([s.logprobs for _, s in pairs])


@pytest.mark.parametrize(
    ("name", "page_size"),
    [
        *((name, size) for name in SPECS if name != LARGE for size in (16, 128)),
        (LARGE, 64),  # the only size that its kernel takes
    ],
)
def test_recorded_logprobs_equal_the_training_forward(name: str, page_size: int, unequal) -> None:
    model, wanted = build(name), requests(SPECS[name].vocab_size)
    cfg = replace(USUAL, max_batch=20, max_step_tokens=150, page_size=page_size)
    samples, stats = generate(model, wanted, cfg)
    assert stats["num_hit_tokens"] > 0
    assert stats["num_partial_chunks"] > 0
    assert (stats["num_copied_tails"] > 0) == (page_size > 16), (
        "on pages of 16 no prompt has a tail worth a copy"
    )
    assert any(sample.kept for sample in samples.values())
    scored, recorded = score(model, wanted, samples)
    assert len(scored) == 6 * 277
    assert unequal(scored.detach(), recorded) == 0
    some = wanted[::7]
    assert unequal(*(x.detach() for x in score(model, some, samples))) == 0


@pytest.fixture
def resumed(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int]]:
    """Return the sequences that engines have resumed after a part of their answer."""
    names, put = set(), SequenceTable.add

    def puts(
        rows: SequenceTable,
        request: Request,
        pages: list[int],
        num_computed: int,
        stop_ids: tuple[int, ...],
    ) -> int:
        if len(request.past):
            names.add((request.uid, request.index))
        return put(rows, request, pages, num_computed, stop_ids)

    monkeypatch.setattr(SequenceTable, "add", puts)
    return names


@pytest.mark.parametrize(("page_size", "num_pages"), [(16, 50), (128, 10)])
def test_preempted_and_resumed_sequences_equal_the_training_forward(
    page_size: int, num_pages: int, resumed: set[tuple[int, int]], unequal
) -> None:
    model, wanted = build("qwen3"), requests(QWEN3.vocab_size)
    cfg = replace(
        USUAL, max_batch=20, max_step_tokens=150, page_size=page_size, num_pages=num_pages
    )
    samples, stats = generate(model, wanted, cfg)
    assert stats["num_preemptions"] >= len(resumed) > 0
    assert (stats["num_copied_tails"] > 0) == (page_size == 128)
    for some in (wanted, [one for one in wanted if (one.uid, one.index) in resumed]):
        assert unequal(*(x.detach() for x in score(model, some, samples))) == 0


def test_any_batch_gives_the_same_samples() -> None:
    model, wanted = build("qwen3"), requests(QWEN3.vocab_size)
    first, _ = generate(model, wanted, replace(USUAL, max_batch=64))
    other = replace(USUAL, max_batch=7, max_step_tokens=33, page_size=64, prefix_cache=False)
    second, _ = generate(model, wanted[::-1], other)
    for name, sample in first.items():
        assert sample.tokens.tobytes() == second[name].tokens.tobytes()
        assert sample.logprobs.tobytes() == second[name].logprobs.tobytes()


def test_graph_replay_equals_eager(unequal) -> None:
    """Replay one decode step of many lengths twice, over the cache that it writes to."""
    model, lengths, page_size = build("qwen3"), np.array([1, 16, 127, 128, 300, 64, 33, 129]), 64
    cache = KvCache(
        kv_layers(3, 4, 64, num_heads=8), num_pages=64, page_size=page_size,
        dtype=torch.bfloat16, device=DEVICE,
    )  # fmt: skip
    table = np.arange(8 * 5).reshape(8, 5)

    def step(starts: np.ndarray, lengths: np.ndarray) -> tuple[PagedAttention, Tensor, Tensor]:
        positions = np.concatenate(
            [np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]
        )
        slots = np.repeat(table[:, 0] * page_size, lengths) + positions
        attend = PagedAttention.chunks(
            cache, page_table=table, starts=starts, lengths=lengths, slots=slots
        )
        return (
            attend,
            torch.from_numpy(positions).to(DEVICE) * 13 % 4096,
            torch.from_numpy(positions).to(DEVICE),
        )

    rows = torch.arange(8, device=DEVICE)
    with torch.inference_mode():
        attend, tokens, positions = step(np.zeros(8, dtype=np.int64), lengths)
        model(tokens, positions, attend)
        attend, tokens, positions = step(lengths, np.ones(8, dtype=np.int64))
        eager, before = model(tokens, positions, attend, rows), cache.data.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = model(tokens, positions, attend, rows)
        for _ in range(2):
            replayed.zero_()
            graph.replay()
            assert unequal(replayed, eager) == 0
            assert unequal(cache.data, before) == 0


def test_control_another_attention_on_one_side_fails(
    monkeypatch: pytest.MonkeyPatch, unequal
) -> None:
    model, wanted = build("qwen3"), requests(QWEN3.vocab_size)
    samples, _ = generate(model, wanted)
    monkeypatch.setattr("spmd_rl.kernels.attention.backend.flash_supports", lambda *_: False)
    assert unequal(*(x.detach() for x in score(model, wanted, samples))) > 0


def test_gradients_are_those_of_the_float32_model() -> None:
    model, wanted = build("qwen3"), requests(QWEN3.vocab_size)
    samples, _ = generate(model, wanted)
    reference = CausalLM(QWEN3)
    reference.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    reference.to(DEVICE)
    for one in (model, reference):
        score(one, wanted, samples)[0].mean().backward()
    wide = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        expected = gradient(wide[name])
        assert (gradient(parameter).float() - expected).norm() / expected.norm() < 0.1, name


def test_logits_are_close_to_transformers(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    from spmd_rl.model.hf import load_weights

    config = transformers.Qwen3Config(
        vocab_size=4096, hidden_size=512, intermediate_size=1536, num_hidden_layers=3,
        num_attention_heads=8, num_key_value_heads=4, head_dim=64,
        max_position_embeddings=2048, tie_word_embeddings=False,
    )  # fmt: skip
    reference = transformers.AutoModelForCausalLM.from_config(config).eval()
    reference.save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    model = CausalLM(spec)
    load_weights(model, tmp_path)
    model.to(DEVICE, torch.bfloat16)
    lengths = np.array([5, 130, 64, 257])
    tokens = torch.randint(
        0, 4096, (int(lengths.sum()),), generator=torch.Generator().manual_seed(0)
    )
    attend = PackedAttention(lengths, device=DEVICE)
    positions = torch.cat([torch.arange(n) for n in lengths])
    with torch.no_grad():
        every = torch.arange(len(tokens), device=DEVICE)
        logits = model(tokens.to(DEVICE), positions.to(DEVICE), attend, every).cpu()
        expected = torch.cat(
            [reference(part[None]).logits[0] for part in tokens.split(lengths.tolist())]
        )
    assert (logits - expected).norm() / expected.norm() < 2e-2
