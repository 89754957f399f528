"""A family and a kind of layer that nobody else knows: all that builds, counts, pushes and watches
models takes them as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from spmd_rl.algo.advantages import group_advantage
from spmd_rl.algo.losses import grpo_loss, sft_loss
from spmd_rl.algo.packing import pack
from spmd_rl.errors import DataError
from spmd_rl.kernels import PackedAttention, Rotary
from spmd_rl.microscope.diagnose.compare import compare
from spmd_rl.microscope.foreign.layout import StoredHeader, check_points
from spmd_rl.microscope.replay.case import ReplayCase, ReplaySequence
from spmd_rl.microscope.replay.engine_pass import EnginePass
from spmd_rl.microscope.replay.forward_pass import TrainerPass, load_model
from spmd_rl.microscope.taps import points
from spmd_rl.model.families import FAMILIES
from spmd_rl.model.families.family import Family
from spmd_rl.model.hf import random_weights, read_weights
from spmd_rl.model.layers.block import BlockSpec
from spmd_rl.model.layers.delta import GatedDelta
from spmd_rl.model.layers.mlp import Mlp
from spmd_rl.model.network import CausalLM
from spmd_rl.model.read import read_spec
from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.memory import cache_token_bytes, engine_memory, running_kv_bytes
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.native.engine import NativeEngine
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.cost.flops import train_flops
from spmd_rl.train.kinds import kind_of
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from tests.dist.train_case import make_batch
from tests.planted import family, latent, mamba
from tests.samples import finish

CPU = torch.device("cpu")
DELTA = GatedDelta(36, 2, 4, key_head_dim=8, value_head_dim=6, conv_size=4, rms_eps=1e-6)
CONFIG = NativeEngineConfig(page_size=4, max_batch=8, max_step_tokens=40, num_pages=200)
LATENT = Family(
    "Latent",
    lambda config: (
        (
            BlockSpec(
                config.count("hidden_size"),
                latent.Latent(config.count("hidden_size"), latent_size=6, key_size=8),
                Mlp(config.count("hidden_size"), config.count("intermediate_size")),
            ),
        )
        * config.count("num_hidden_layers"),
        2,
    ),
)
MAMBA = mamba.Mamba2(36, 4, 6, num_groups=2, state_size=8, conv_size=4, rms_eps=1e-6)
MAMBAS = Family("Mamba", lambda config: ((BlockSpec(36, MAMBA, Mlp(36, 54)),) * 3, 2))
DELTAS = Family("Delta", lambda config: ((BlockSpec(36, DELTA, Mlp(36, 54)),) * 3, 2))


@pytest.fixture(autouse=True)
def _planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(FAMILIES, "planted_moe", family.PLANTED)
    monkeypatch.setitem(FAMILIES, "planted_latent", LATENT)
    monkeypatch.setitem(FAMILIES, "planted_delta", DELTAS)
    monkeypatch.setitem(FAMILIES, "planted_mamba", MAMBAS)
    known = dict(points.OPS)
    yield
    points.set_ops(known)  # other tests ask for the points of the families that are shipped


@pytest.fixture(params=["planted_moe", "planted_latent", "planted_delta", "planted_mamba"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    config = family.CONFIG | {"model_type": request.param}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def plain_logits(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """The planted mixture in float64, of torch's own operations alone."""
    w = {name: one.double() for name, one in weights.items()}
    length, x = len(tokens), w["model.embed_tokens.weight"][tokens]
    angles = torch.arange(length).double()[:, None] * 10000.0 ** (-torch.arange(0, 10, 2) / 10)
    cos, sin = (torch.cat([one, one], -1)[:, None] for one in (angles.cos(), angles.sin()))

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w[name]

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def gated(x: Tensor, name: str) -> Tensor:
        gate, up, down = (w[f"{name}.{one}_proj.weight"] for one in ("gate", "up", "down"))
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def experts(x: Tensor, name: str) -> Tensor:
        shares = (x @ w[f"{name}.gate.weight"].T).softmax(-1)
        best = shares.topk(2, -1)
        best_shares = best.values / best.values.sum(-1, keepdim=True)
        rows = []
        for token in range(length):
            chosen = zip(best_shares[token], best.indices[token].tolist(), strict=True)
            rows.append(
                sum(share * gated(x[token], f"{name}.experts.{one}") for share, one in chosen)
            )
        return torch.stack(rows) + gated(x, f"{name}.shared_expert")

    for layer in range(3):
        at = f"model.layers.{layer}"
        h = norm(x, f"{at}.input_layernorm.weight")
        q, k, v = (
            (h @ w[f"{at}.self_attn.{one}_proj.weight"].T).unflatten(-1, (-1, 10)) for one in "qkv"
        )
        q = turned(norm(q, f"{at}.self_attn.q_norm.weight"))
        k = turned(norm(k, f"{at}.self_attn.k_norm.weight"))
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        mixed = F.scaled_dot_product_attention(
            *(one.transpose(0, 1) for one in (q, k, v)), is_causal=True
        )
        x = x + mixed.transpose(0, 1).flatten(1) @ w[f"{at}.self_attn.o_proj.weight"].T
        h = norm(x, f"{at}.post_attention_layernorm.weight")
        x = x + (gated(h, f"{at}.mlp") if layer == 0 else experts(h, f"{at}.mlp"))
    return norm(x, "model.norm.weight") @ w["lm_head.weight"].T


def engine_of(folder: Path, weights: dict[str, Tensor]) -> NativeEngine:
    with torch.no_grad():
        model = CausalLM(read_spec(folder)).requires_grad_(False)
        model.load_state_dict(weights)
    return NativeEngine(model, CONFIG, CPU)


def weights_of(trainer) -> dict[str, Tensor]:
    state = trainer.backend.state()["weights"]
    return {name: one.local.detach().clone() for name, one in state}


def test_the_counts_are_those_of_the_network(folder: Path) -> None:
    spec = read_spec(folder)
    with torch.device("meta"):
        model = CausalLM(spec)
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
    assert list(shapes.items()) == list(spec.parameter_shapes().items())
    assert sum(one.numel() for one in model.parameters()) == spec.num_parameters


def test_it_is_a_plain_torch_model(new_trainer, tmp_path: Path) -> None:
    """Log-probs before a step and after it, and the length of the gradient beside the loss."""
    (tmp_path / "config.json").write_text(json.dumps(family.CONFIG))
    trainer, batch = new_trainer(model=tmp_path, lr=1e-3), make_batch()
    starts = np.cumsum(batch.lengths) - batch.lengths
    for _ in range(2):
        weights = {name: one.requires_grad_() for name, one in weights_of(trainer).items()}
        scored, total = trainer.score(batch).values, torch.zeros((), dtype=torch.float64)
        for number, start in enumerate(starts):
            place = slice(start + 1, start + batch.lengths[number])
            tokens = torch.from_numpy(batch.tokens[start : place.stop]).long()
            logits = plain_logits(weights, tokens)[:-1] / float(batch.temperature[number] or 1.0)
            plain = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            mask = batch.mask[place]
            total = total - plain[torch.from_numpy(mask)].sum()
            expected = plain.detach().numpy()[mask]
            np.testing.assert_allclose(scored[place][mask], expected, rtol=1e-4, atol=1e-4)
        total.backward()
        length = torch.stack([one.grad.norm() for one in weights.values()]).norm()
        stats = trainer.train_step(batch, sft_loss)
        of_loss = stats["train/grad_norm"] / stats["train/loss"]
        assert of_loss == pytest.approx(float(length / total.detach()), rel=1e-3)


def test_the_engine_draws_the_trainers_bits(new_trainer, folder: Path) -> None:
    trainer, rng = new_trainer(model=folder), np.random.default_rng(0)
    trainer.train_step(make_batch(), grpo_loss)
    engine = engine_of(folder, weights_of(trainer))
    engine.sink().commit(1)
    prompts = [Prompt(uid, rng.integers(2, 50, 3 + 4 * uid).astype(np.int32)) for uid in range(4)]
    sampling = SamplingConfig(num_samples=3, max_tokens=12, temperature=0.8)
    wanted = [
        Request(one.uid, index, one.tokens, sampling) for one in prompts for index in range(3)
    ]
    drawn = finish(engine, wanted)
    groups = [
        Group(
            prompt,
            [replace(drawn[prompt.uid, index], reward=float(index)) for index in range(3)],
        )
        for prompt in prompts
    ]
    batch = pack(groups, group_advantage(groups))
    scored = trainer.score(batch).values
    assert batch.mask.sum() > 50
    np.testing.assert_array_equal(
        scored[batch.mask].view(np.int32), batch.rollout_logprobs[batch.mask].view(np.int32)
    )


def test_what_it_takes_is_planned(folder: Path) -> None:
    from spmd_rl.mesh.split import RoleSplit, plan_split

    spec, placement = read_spec(folder), plan_split({"train": RoleSplit()}, 1).train
    cfg = TrainerConfig()
    trained = {one.tag: one for one in kind_of(cfg).memory(spec, cfg, placement, "lm")}
    assert trained["master"].num_bytes == 4 * spec.num_parameters
    served = {one.tag: one for one in engine_memory(spec, CONFIG, False)}
    assert served["weights"].num_bytes == 2 * spec.num_parameters
    caches = {"planted_latent": 6, "planted_delta": 0, "planted_mamba": 0}
    elements = caches.get(spec.family, 2 * 2 * 10)
    assert cache_token_bytes(spec, 4) == 3 * elements * 4
    states = {
        "planted_delta": 3 * (2 * 16 + 24) + 4 * 8 * 6,
        "planted_mamba": 3 * (24 + 2 * 16) + 4 * 6 * 8,
    }
    state = 3 * 4 * states.get(spec.family, 0)
    assert spec.state_bytes(4) == state
    engine = engine_of(folder, dict(random_weights(spec, 0)))
    in_pages = 200 * 4 * cache_token_bytes(spec, 4)
    # 8 rows, padding and a snapshot; each of six arrays begins at a multiple of 256 bytes
    assert 0 <= engine.stats()["kv_bytes"] - in_pages - 10 * state < 6 * 256
    assert running_kv_bytes(spec, NativeEngineConfig(page_size=4), 1, 8) > 0
    flops = train_flops(spec, np.array([5], np.int32), 0)
    multiplied = sum(block.cost().multiplied for block in spec.blocks)
    assert flops >= 6 * 5 * multiplied
    attends = spec.blocks[0].cost().flops_per_key > 0
    assert (flops > 6 * 5 * multiplied) == attends


def test_every_point_is_compared(folder: Path, new_trainer) -> None:
    trainer = new_trainer(model=folder)
    trainer.export_hf(str(folder / "hf"))
    rng = np.random.default_rng(0)
    case = ReplayCase(
        tuple(
            ReplaySequence(f"{number}:0", rng.integers(2, 50, 9), rng.integers(2, 50, length))
            for number, length in enumerate((4, 30))
        )
    )
    engine = EnginePass(load_model(folder / "hf", torch.float32, CPU), CONFIG)
    model = load_model(folder / "hf", torch.float32, CPU)
    taught = TrainerPass(model, max_tokens=64, logit_rows=16)
    comparison = compare(engine, taught, case)
    ops = {point.op for point in comparison.points}
    family_ops = {
        "planted_moe": {"router", "experts"},
        "planted_latent": {"latent", "mixed"},
        "planted_delta": {"in_proj_qkv", "delta", "out_proj"},
        "planted_mamba": {"in_proj", "scan", "out_proj"},
    }
    own = family_ops[read_spec(folder).family]
    assert own <= ops
    assert comparison.agree


def test_a_dump_may_hold_an_op_of_some_layers(folder: Path) -> None:
    spec = read_spec(folder)
    rows = {"tokens": StoredHeader("I64", (4,)), "positions": StoredHeader("I64", (4,))}
    ops = {
        f"layers.{number}.{one.op}": StoredHeader("F32", (4, *one.shape))
        for number, block in enumerate(spec.blocks)
        for one in block.points()
    }
    assert len(check_points("dump", rows | ops, spec)) == len(ops)
    op = {
        "planted_moe": "router",
        "planted_latent": "latent",
        "planted_delta": "delta",
        "planted_mamba": "scan",
    }[spec.family]
    del ops[f"layers.2.{op}"]
    with pytest.raises(DataError, match=rf"it lacks layers\.2\.{op}, though it holds"):
        check_points("dump", rows | ops, spec)


def test_an_export_has_its_weights(folder: Path, new_trainer) -> None:
    trainer = new_trainer(model=folder)
    trainer.train_step(make_batch(), grpo_loss)
    trainer.export_hf(str(folder / "hf"))
    weights = weights_of(trainer)
    exported = dict(read_weights(folder / "hf"))
    assert exported.keys() == weights.keys()
    assert all(torch.equal(one, weights[name]) for name, one in exported.items())


def test_the_planted_state_space_is_that_of_nemotron_h() -> None:
    """Outputs and gradients of its module and of transformers'."""
    config = NemotronHConfig(
        hidden_size=36,
        mamba_num_heads=4,
        mamba_head_dim=6,
        n_groups=2,
        ssm_state_size=8,
        conv_kernel=4,
        layer_norm_epsilon=1e-6,
        use_conv_bias=True,
        use_bias=False,
    )
    theirs, ours = NemotronHMamba2Mixer(config, 0), MAMBA.module(0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, one in sorted(theirs.named_parameters()):
            one.copy_(torch.randn(one.shape, generator=generator) * 0.3)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(21, 36, generator=generator)
    attend = PackedAttention(np.array([21]), device=CPU)
    nothing = torch.empty(0)
    out = ours(x, Rotary(nothing, nothing, nothing), attend)
    expected = theirs(x[None])[0]
    assert (out - expected).norm() <= 2e-5 * expected.norm()
    out.sum().backward()
    expected.sum().backward()
    others = dict(theirs.named_parameters())
    for name, one in ours.named_parameters():
        assert (one.grad - others[name].grad).norm() <= 5e-5 * others[name].grad.norm(), name
