"""Faults, each planted in one place of the engine: the microscope names layer and op.

`tests/dist/test_microscope_ranks.py` has those of exchanges between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_rl.kernels import TokenAttention, rope_table
from spmd_rl.kernels.delta.states import SequenceStates
from spmd_rl.microscope.diagnose.faults import plant
from spmd_rl.microscope.examine import ReplaySetup, examine
from spmd_rl.microscope.replay.case import ReplayCase, ReplaySequence
from spmd_rl.microscope.replay.engine_pass import EnginePass
from spmd_rl.microscope.replay.forward_pass import TrainerPass, load_model
from spmd_rl.microscope.taps import points
from spmd_rl.model.layers.moe_module import MoeMlp
from spmd_rl.model.lora import LoraConfig
from spmd_rl.model.peft_folder import save_adapters
from spmd_rl.model.read import read_spec
from spmd_rl.model.rope_frequencies import inverse_frequencies
from spmd_rl.rollout.engine import SamplingConfig
from spmd_rl.rollout.native.config import NativeEngineConfig
from tests.unit.microscope.conftest import CPU, write_model

LAYER = 1  # of three
MIXTURE = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
LORA = LoraConfig(rank=4, alpha=8.0)
Fault = Callable[[EnginePass], None]


def layer_of(engine: EnginePass, number: int = LAYER) -> Any:
    return engine.model.model.layers[number]


def wrong_eps(engine: EnginePass) -> None:
    layer_of(engine).post_attention_layernorm.eps = 1e-2


def norm_in_bfloat16(engine: EnginePass) -> None:
    norm = layer_of(engine).input_layernorm
    exact = norm.forward

    def rounded(x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        out, summed = exact(x, residual)
        return out.bfloat16().float(), summed

    norm.forward = rounded


def residual_left_out(engine: EnginePass) -> None:
    norm = layer_of(engine).post_attention_layernorm
    exact = norm.forward
    norm.forward = lambda x, residual=None: (exact(x, None)[0], exact(x, residual)[1])


def wrong_rope_base(engine: EnginePass) -> None:
    model, rope = engine.model, engine.model.spec.rope
    other = inverse_frequencies(replace(rope, theta=rope.theta * 1.5))
    tables = rope_table(other, model.spec.max_positions, rope.attention_factor)
    model.rope_tables = lambda device: tables  # type: ignore[method-assign]


def positions_off_by_one(engine: EnginePass) -> None:
    def later(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args[0], args[1] + 1, *args[2:]

    engine.model.register_forward_pre_hook(later)


def key_norm_left_out(engine: EnginePass) -> None:
    layer_of(engine).self_attn.k_norm.weight.data.fill_(1.0)


def bias_left_out(engine: EnginePass) -> None:
    layer_of(engine).self_attn.q_proj.bias = None


def stale_weight(engine: EnginePass) -> None:
    layer_of(engine, 2).self_attn.o_proj.weight.data.mul_(0.999)


def swapped_rows(engine: EnginePass) -> None:
    mlp = layer_of(engine).mlp
    mlp.up_proj.weight, mlp.gate_proj.weight = mlp.gate_proj.weight, mlp.up_proj.weight


def another_activation(engine: EnginePass) -> None:
    mlp = layer_of(engine).mlp
    mlp.forward = lambda x: mlp.down_proj(F.gelu(mlp.gate_proj(x)) * mlp.up_proj(x))


class Bent(TokenAttention):
    """Attention of one layer whose inputs and outputs are changed on their way."""

    def __init__(self, attend: TokenAttention, of_q: Any, of_out: Any = lambda out: out) -> None:
        self.attend, self.of_q, self.of_out = attend, of_q, of_out

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **reach: Any) -> Tensor:
        if layer != LAYER:
            return self.attend(layer, q, k, v, **reach)
        return self.of_out(self.attend(layer, self.of_q(q), k, v, **reach))

    def history(self, layer: int, *rows: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
        return self.attend.history(layer, *rows)

    def sequences(self, layer: int) -> Iterator[tuple[slice | Tensor, SequenceStates]]:
        return self.attend.sequences(layer)


def wrong_attention_scale(engine: EnginePass) -> None:
    engine.wrap_attention = lambda replay, attend: Bent(attend, lambda q: q * 1.1)


def wrong_key_heads(engine: EnginePass) -> None:
    engine.wrap_attention = lambda replay, attend: Bent(
        attend, lambda q: q.roll(1, 1), lambda out: out.roll(-1, 1)
    )


def softcap(engine: EnginePass) -> None:
    model, logits = engine.model, engine.model.logits
    model.logits = lambda hidden: 5 * (logits(hidden) / 5).tanh()  # type: ignore[method-assign]


def wrong_embedding(engine: EnginePass) -> None:
    model = engine.model.model
    embedded = model._embedded
    model._embedded = lambda tokens: embedded(tokens) * 1.01  # type: ignore[method-assign]


def untempered(engine: EnginePass) -> None:
    sample = engine.sampler

    def draw(logits: Tensor, inverse: Tensor, *rest: Any, **filters: Any) -> tuple[Tensor, Tensor]:
        return sample(logits, torch.ones_like(inverse), *rest, **filters)

    engine.sampler = draw


def mixture_of(engine: EnginePass) -> MoeMlp:
    mixture = layer_of(engine).mlp
    assert isinstance(mixture, MoeMlp)
    return mixture


def swapped_experts(engine: EnginePass) -> None:
    experts = mixture_of(engine).experts
    experts[0], experts[1] = experts[1], experts[0]


def weights_not_normalised(engine: EnginePass) -> None:
    mixture_of(engine).normalizes_weights = False


def stale_router(engine: EnginePass) -> None:
    mixture_of(engine).gate.weight.data.mul_(0.99)


def adapter_left_out(engine: EnginePass) -> None:
    layer_of(engine).self_attn.v_proj.is_switched_off = True


def wrong_scale_of_a_block(engine: EnginePass) -> None:
    scales = layer_of(engine).mlp.gate_proj.weight_scale_inv
    scales.data.view(-1)[0] *= 2


def split_of_codes(engine: EnginePass) -> None:
    plant("split-k", engine)


def split_beside_an_adapter(engine: EnginePass) -> None:
    plant("split-k", engine)


# by the model that it is planted in: each fault, and the words with which the verdict begins
FAULTS: dict[str, dict[Fault, str]] = {
    "dense": {
        wrong_eps: "layer 1 post_norm: ",
        norm_in_bfloat16: "layer 1 input_norm: ",
        residual_left_out: "layer 1 post_norm: ",
        wrong_rope_base: "layer 0 q: ",
        positions_off_by_one: "layer 0 q: ",
        key_norm_left_out: "layer 1 k: ",
        bias_left_out: "layer 1 q_proj: ",
        stale_weight: "layer 2 o_proj: ",
        swapped_rows: "layer 1 gate_proj: ",
        another_activation: "layer 1 act: ",
        wrong_attention_scale: "layer 1 attention: ",
        wrong_key_heads: "layer 1 attention: ",
        softcap: "logits: ",
        wrong_embedding: "embed: ",
        untempered: "logprob: ",
        partial(plant, "split-k"): "layer 1 down_proj: ",
    },
    "mixture": {
        swapped_experts: "layer 1 experts: ",
        weights_not_normalised: "layer 1 routes: ",
        stale_router: "layer 1 router: ",
    },
    "adapters": {
        adapter_left_out: "layer 1 v_proj: ",
        split_beside_an_adapter: "layer 1 down_proj: ",
    },
    "codes": {
        wrong_scale_of_a_block: "layer 1 gate_proj: ",
        split_of_codes: "layer 1 down_proj: ",
    },
}
NUM_FAULTS = sum(map(len, FAULTS.values()))
# what the verdict says of the engine's arithmetic
NAMED = {
    adapter_left_out: "the contract's product without the adapter",
    untempered: "the log-prob at temperature 1",
    split_of_codes: "K summed in 2 parts",
    split_beside_an_adapter: "K summed in 2 parts",
}


@pytest.fixture(autouse=True)
def _ops(no_kernels: None) -> Iterator[None]:
    known = dict(points.OPS)
    yield
    points.set_ops(known)


@pytest.fixture
def case() -> ReplayCase:
    rng = np.random.default_rng(0)
    sampling = SamplingConfig(temperature=0.7)
    return ReplayCase(
        tuple(
            ReplaySequence(f"{n}:0", rng.integers(2, 30, 6), rng.integers(2, 30, length), sampling)
            for n, length in enumerate((2, 6))
        )
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The arguments of `load_model` for each model."""
    parent = tmp_path_factory.mktemp("models")
    dense = write_model(parent / "dense", attention_bias=True)
    mixture = write_model(parent / "mixture", **MIXTURE)
    generator = torch.Generator().manual_seed(3)
    shapes = LORA.shapes(read_spec(dense)).items()
    adapters = [(name, 0.1 * torch.randn(shape, generator=generator)) for name, shape in shapes]
    save_adapters(parent / "peft", dense, LORA, adapters)
    return {
        "dense": {"folder": dense},
        "mixture": {"folder": mixture},
        "adapters": {"folder": dense, "lora": replace(LORA, folder=str(parent / "peft"))},
        "codes": {"folder": dense, "weights": "e4m3"},
    }


def said(model: dict[str, Any], case: ReplayCase, fault: Fault | None = None) -> str:
    """The verdict of an engine with that fault beside the trainer."""
    load = partial(load_model, dtype=torch.float32, device=CPU, **model)
    cfg = NativeEngineConfig(page_size=4, max_batch=8, max_step_tokens=40)
    engine = EnginePass(load(holds=True), cfg)
    if fault is not None:
        fault(engine)
    trainer = TrainerPass(load(), max_tokens=64, logit_rows=16)
    return examine(ReplaySetup(case, engine, trainer, str(model["folder"]))).verdict


@pytest.mark.parametrize("name", FAULTS)
def test_without_a_fault_every_bit_agrees(name: str, models, case: ReplayCase) -> None:
    assert "agree in every bit" in said(models[name], case)


def test_of_twenty_faults_nineteen_are_named(models, case: ReplayCase) -> None:
    assert NUM_FAULTS >= 20
    missed = {}
    for name, faults in FAULTS.items():
        for fault, words in faults.items():
            verdict = said(models[name], case, fault)
            if not (verdict.startswith(words) and NAMED.get(fault, "") in verdict):
                missed[str(fault)] = verdict
    assert len(missed) <= 1, missed
