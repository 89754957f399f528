"""The plan of published mixtures, from their config.json, and what layers say of themselves."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from benchmarks.shapes import write_config
from spmd_rl.errors import ConfigError, PlanError
from spmd_rl.model.formats import FORMATS, WeightFormat
from spmd_rl.model.layers.moe import Moe
from spmd_rl.model.layers.sigmoid_router import SigmoidRouter
from spmd_rl.model.read import read_spec
from spmd_rl.plan import main
from spmd_rl.rollout.memory import engine_memory
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.train.cost.flops import train_flops

H200 = "--gpu-gib=139.8"
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GLM_4_5_AIR = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "partial_rotary_factor": 0.5,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "use_qk_norm": False,
    "vocab_size": 151552,
}


def attention(config: dict[str, Any]) -> int:
    """Elements of the four matrices."""
    heads = config["num_attention_heads"] + config["num_key_value_heads"]
    return 2 * config["hidden_size"] * heads * config["head_dim"]


def qwen_sizes() -> tuple[int, int, int]:
    """Parameters, those that a token takes, and those of its products: by hand."""
    hidden, vocab, layers = 2048, 151936, 48
    expert, shared = 3 * hidden * 768, attention(QWEN3_30B_A3B) + hidden * 128
    norms = layers * (2 * hidden + 2 * 128) + hidden
    outer = 2 * vocab * hidden + norms
    products = layers * (8 * expert + shared) + vocab * hidden
    return (
        layers * (128 * expert + shared) + outer,
        layers * (8 * expert + shared) + outer,
        products,
    )


def glm_sizes() -> tuple[int, int, int]:
    hidden, vocab, layers = 4096, 151552, 46
    expert, mixed = 3 * hidden * 1408, attention(GLM_4_5_AIR)
    bias = (96 + 2 * 8) * 128
    dense, router = 3 * hidden * 10944, hidden * 128
    beside = layers * (2 * hidden + bias) + hidden + 2 * vocab * hidden + 45 * 128
    common = layers * mixed + dense + 45 * router
    return (
        common + 45 * 129 * expert + beside,
        common + 45 * 9 * expert + beside,
        common + 45 * 9 * expert + vocab * hidden,
    )


MODELS = {
    # as published: billions of parameters, and of those that a token takes
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, qwen_sizes, 30.5, 3.3),
    "GLM-4.5-Air": (GLM_4_5_AIR, glm_sizes, 106, 12),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[request.param][0]))
    return request.param, tmp_path


def test_sizes_are_those_by_hand(model: tuple[str, Path]) -> None:
    name, folder = model
    spec = read_spec(folder)
    _, by_hand, billions, active = MODELS[name]
    assert (spec.num_parameters, spec.num_active_parameters, spec.flops_per_token // 2) == by_hand()
    assert spec.num_parameters / 1e9 == pytest.approx(billions, rel=0.01)
    # published counts leave out the embedding, and are rounded
    assert spec.num_active_parameters / 1e9 == pytest.approx(active, rel=0.13)
    # without attention between tokens, a train step is three forward passes
    assert train_flops(spec, np.ones(64, np.int32), 64) == pytest.approx(
        3 * 64 * spec.flops_per_token, rel=1e-3
    )


def test_the_plan_says_them(model: tuple[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = model[1]
    spec = read_spec(folder)
    main(["sft", f"--model={folder}", "--data=x.jsonl", "--world=8"])
    said = capsys.readouterr().out
    assert f"{spec.num_parameters:,} parameters" in said
    assert (
        f"takes {spec.num_active_parameters:,} of them, and {spec.flops_per_token / 1e9:.2f}"
    ) in said
    master = f"{-(-spec.num_parameters // 8) * 4 / 2**30:.4g} GiB"
    assert next(line for line in said.splitlines() if line.startswith("  master")).count(master)


def test_the_least_number_of_gpus(
    model: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A GPU of the native engine has all weights, 57 GiB of the one. The other has 199 GiB of them,
    so that its experts are shared.
    """
    name, folder = model
    words = ["grpo", f"--model={folder}", "--data=x.jsonl", "--fewest-gpus", H200]
    expected = {"Qwen3-30B-A3B": ("4 GPUs", False), "GLM-4.5-Air": ("16 GPUs", True)}
    assert main(words) == 0
    fits = _fitting(capsys)
    assert (fits.split(" fits: ")[0].strip(), "--split.infer.ep=" in fits) == expected[name]
    if name == "GLM-4.5-Air":
        assert main(["sft", *words[1:]]) == 0
        assert _fitting(capsys).split(" fits: ")[0].strip() == "8 GPUs"


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("ep", [1, 4])
def test_an_engine_in_few_bits_holds_codes_and_scales_of_its_experts(
    model: tuple[str, Path], ep: int, weights: WeightFormat
) -> None:
    spec = read_spec(model[1])
    full, coded = (
        engine_memory(spec, replace(NativeEngineConfig(), weights=one), True, ep=ep)[0].num_bytes
        for one in ("full", weights)
    )
    held = [one for one in spec.parameters() if "layers" in one.name and len(one.shape) == 2]
    routers = [one for one in held if one.name.endswith(".gate.weight")]
    layout = FORMATS[weights]
    saved = {one.name: 2 * one.num_elements - layout.num_bytes(one.shape) for one in held}
    shared = sum(saved[one.name] for one in held if one.expert is not None)
    every = sum(saved.values()) - sum(saved[one.name] for one in routers)
    assert len(routers) == len([one for one in spec.blocks if isinstance(one.mlp, Moe)])
    assert full - coded == every - shared + shared // ep


def _fitting(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr().out.splitlines()
    return next(line for line in said if " fits: " in line)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("split.infer.ep=3 nproc=3", "split.infer.ep = 3 does not divide the 128 experts of a"),
        ("split.infer.ep=4", "split.infer.ep = 4 does not divide the 2 ranks of a stage"),
        (
            "split.infer.ep=2 engine.kind=sglang run.exact=false",
            "split.infer.ep = 2: the SGLang engine has the axes dp, fsdp and tp alone",
        ),
        *(
            (
                f"split.infer.ep=2 trainer.lora.rank={rank}",
                "split.infer.ep = 2 does not go with adapters that are pushed alone: set "
                "trainer.lora.merged_push = true",
            )
            for rank in (1, 4)
        ),
    ],
)
def test_engines_that_cannot_share_experts_are_refused(
    model: tuple[str, Path], words: str, sentence: str
) -> None:
    if "sglang" in words and read_spec(model[1]).fixed_names():
        sentence = "has routers with corrections"
    flags = [f"--{word}" for word in words.split()]
    given = ["grpo", f"--model={model[1]}", "--data=x.jsonl", *flags]
    nproc = [] if "nproc" in words else ["--nproc=2"]
    with pytest.raises((ConfigError, PlanError), match=re.escape(sentence)):
        main([*given, *nproc])


def test_engines_of_a_dense_model_share_nothing(tmp_path: Path) -> None:
    write_config("8B", tmp_path)
    words = [f"--model={tmp_path}", "--data=x.jsonl", "--nproc=2", "--split.infer.ep=2"]
    with pytest.raises(ConfigError, match=r"ep = 2: the model has no experts to share"):
        main(["grpo", *words])


SIZES = st.tuples(st.integers(1, 12), st.integers(1, 12)).map(lambda two: (max(two), min(two)))


@given(SIZES, st.sampled_from([8, 20, 48]), st.sampled_from([0, 16, 40]), st.booleans())
@settings(max_examples=30, deadline=None)
def test_a_mixture_keeps_what_it_says(
    sizes: tuple[int, int], size: int, shared: int, by_sigmoid: bool
) -> None:
    """In float32 on the CPU, whose activation keeps its denominator besides."""
    experts, chosen = sizes
    hidden, tokens = 32, 2048
    sigmoid = SigmoidRouter() if by_sigmoid else None
    spec = Moe(hidden, experts, chosen, size, shared_size=shared, sigmoid=sigmoid)
    module = spec.module(0)
    for one in module.parameters():
        nn.init.normal_(one, std=0.1)
    assert sum(one.numel() for one in module.parameters()) == spec.cost().parameters
    idle = sum(
        one.num_elements
        for one in spec.parameters()
        if one.expert is not None and one.expert >= chosen
    )
    assert spec.cost().idle == idle
    x = torch.randn(tokens, hidden, requires_grad=True)
    beside = {one.untyped_storage().data_ptr() for one in (*module.parameters(), x)}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in beside and tensor.is_floating_point():
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(x)
    found = sum(one.nbytes() for one in kept.values()) / 4 / tokens
    inner = chosen * size + shared
    # the sums are of the compute dtype here, half of what is counted
    said = spec.cost().kept("none") + inner - chosen * hidden
    # beside probabilities and weights; an expert's rows are copied into whole tiles on a CPU
    tiles = 1.05 * chosen * hidden + 1.05 * 15 / tokens * experts * (hidden + size) * 4
    assert said - 2 <= found <= said + experts + 3 * chosen + tiles
