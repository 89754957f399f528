"""A mixture in SGLang itself: pushes reach every expert, and a trainer replays its routes.

SPMD_RL_SGLANG names its interpreter or its folder of packages. Routes need SGLang 0.5.17.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spmd_rl.algo.losses import grpo_loss
from spmd_rl.algo.packing import pack
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.sglang.build import build
from spmd_rl.rollout.sglang.config import SglangEngineConfig
from spmd_rl.rollout.sglang.engine import SglangEngine
from spmd_rl.rollout.sglang.options import ROUTES_VERSION, ask_site
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.trainer import Trainer
from spmd_rl.types.batch import Batch
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.routes import EXPERT_IDS
from spmd_rl.weights.local_tensors import LocalTensors
from spmd_rl.weights.proof.digest import digest
from tests.dist.train_case import write_model_folder
from tests.engine_suite import push, put
from tests.gpu.train.conftest import SIZES
from tests.samples import Samples, finish

PYTHON = os.environ.get("SPMD_RL_SGLANG", "/tmp/sgl" if Path("/tmp/sgl/sglang").is_dir() else "")
EXPERTS = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "max_position_embeddings": 1024,
    "initializer_range": 0.08,
}
NEAR = 0.05  # mean abs(dlogp) of bfloat16 from other kernels
NUM_PROMPTS, NUM_SAMPLES = 16, 4

pytestmark = pytest.mark.skipif(
    not PYTHON and importlib.util.find_spec("sglang") is None,
    reason="needs SGLang: SPMD_RL_SGLANG names its interpreter or folder",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model_folder(tmp_path_factory.mktemp("mixture"))
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | SIZES | EXPERTS))
    return folder


@pytest.fixture(scope="module")
def trainer(context: RoleContext, folder: Path) -> Trainer:
    return Trainer(TrainerConfig(init="random", lr=1e-3, max_tokens=8000), context, str(folder))


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    backend = trainer.backend
    return {name: backend.gather(name).to(torch.bfloat16) for name in backend.names()}


@pytest.fixture(scope="module")
def engine(trainer: Trainer, folder: Path) -> Iterator[SglangEngine]:
    options: dict[str, Any] = {
        "attention_backend": "triton",
        "cuda_graph_max_bs_decode": 16,
        "max_total_tokens": 32768,  # other processes have some of the GPU
    }
    cfg = SglangEngineConfig(python=PYTHON, options=options, max_batch=32)
    records = ask_site(PYTHON).version == ROUTES_VERSION
    device = trainer.context.device
    made = build(cfg, str(folder), device, lambda tokens: "", records_routes=records)
    assert isinstance(made, SglangEngine)
    yield made
    made.close()


@pytest.fixture
def _needs_routes() -> None:
    if (version := ask_site(PYTHON).version) != ROUTES_VERSION:
        pytest.skip(f"SGLang {version} is not asked for routes")


def requests(**sampling: Any) -> list[Request]:
    how = SamplingConfig(**{"max_tokens": 60, "ignore_eos": True} | sampling)
    return [
        Request(
            uid,
            index,
            np.random.default_rng(uid).integers(2, SIZES["vocab_size"], 5 + 9 * uid).astype("i4"),
            how,
        )
        for uid in range(NUM_PROMPTS)
        for index in range(NUM_SAMPLES)
    ]


def packed(engine: SglangEngine, asked: list[Request]) -> Batch:
    samples = finish(engine, asked)
    prompts = {one.uid: one.prompt for one in asked}
    groups = [
        Group(Prompt(uid, prompt), [samples[uid, index] for index in range(NUM_SAMPLES)])
        for uid, prompt in prompts.items()
    ]
    return pack(groups, [np.linspace(-1, 1, NUM_SAMPLES)] * NUM_PROMPTS)


def distance(trainer: Trainer, batch: Batch) -> float:
    """The mean distance of the trainer's log-probs from the engine's."""
    scores = trainer.learner.score(batch)
    return float(np.abs(scores - batch.rollout_logprobs)[batch.mask].mean())


def test_a_push_brings_every_expert(engine: SglangEngine, trainer: Trainer) -> None:
    """The digests are those of SGLang's parameters, and so are the numbers."""
    weights = weights_of(trainer)
    push(engine, {name: one * 2 for name, one in weights.items()}, 1)
    push(engine, weights, 2)
    found = distance(trainer, packed(engine, requests()))
    assert found < NEAR
    swapped = {
        name: weights[name.replace("gate_proj", "up_proj")] if "gate_proj" in name else one
        for name, one in weights.items()
    }
    push(engine, swapped, 3)  # the negative control: other weights in one half of a parameter
    assert distance(trainer, packed(engine, requests())) > 2 * found


def test_a_flipped_byte_in_an_expert_is_seen(engine: SglangEngine, trainer: Trainer) -> None:
    weights = weights_of(trainer)
    wrong = {name: tensor.clone() for name, tensor in weights.items()}
    name = next(one for one in wrong if one.endswith("experts.7.up_proj.weight"))
    wrong[name].view(torch.uint8).view(-1)[3] ^= 1
    sink = engine.sink()
    sink.open()
    put(sink, wrong)
    held = {name: value for (name, _), value in sink.digest().items()}
    expected = digest(LocalTensors.whole(weights))
    assert [one for one in held if held[one] != expected[one]] == [name]
    sink.commit(4)


@pytest.mark.usefixtures("_needs_routes")
def test_a_trainer_replays_the_routes(engine: SglangEngine, trainer: Trainer) -> None:
    push(engine, weights_of(trainer), 0)
    batch = packed(engine, requests(replay_routes=True))
    routes = batch.columns[EXPERT_IDS]
    firsts = np.cumsum(batch.lengths) - batch.lengths
    recorded = routes[:, -1] > 0
    assert not recorded[firsts].any() and np.delete(recorded, firsts).all()
    others = {name: one for name, one in batch.columns.items() if name != EXPERT_IDS}
    replayed, own = (distance(trainer, one) for one in (batch, replace(batch, columns=others)))
    stats = trainer.train_step(batch, grpo_loss)
    print(
        f"mean abs(dlogp) {own:.6f} without replay, {replayed:.6f} with it; choices that the "
        f"router would have made otherwise: {stats['experts/rerouted']:.5f}, "
        f"{stats['experts/rerouted_worst']:.5f} in the worst layer; "
        f"{stats['onpolicy/router_flips']:.0f} of {batch.mask.sum()} tokens flipped"
    )
    assert stats["onpolicy/router_flips"] < batch.mask.sum() / 2
    # routes of other rows would differ nearly everywhere
    assert stats["experts/rerouted"] < 0.1
    assert replayed < NEAR
    assert replayed <= own * 1.05
    assert stats["train/grad_norm"] > 0


@pytest.mark.usefixtures("_needs_routes")
def test_routes_survive_an_abort_and_a_stop(engine: SglangEngine, trainer: Trainer) -> None:
    push(engine, weights_of(trainer), 5)
    asked = requests(max_tokens=400, replay_routes=True, stop_ids=(7, 8, 9))
    for request in asked:
        engine.submit(request)
    done: Samples = {}
    while engine.stats()["num_generated_tokens"] < 200:
        done |= {(one.prompt_uid, one.index): one for one in engine.step().finished}
    partial = {(one.prompt_uid, one.index): one for one in engine.abort()}
    push(engine, weights_of(trainer), 6)
    done |= finish(
        engine,
        [
            one.resumed(partial[one.uid, one.index])
            for one in asked
            if (one.uid, one.index) in partial
        ],
    )
    assert len(done) == len(asked)
    num_unknown = 0
    for request in asked:
        sample = done[request.uid, request.index]
        assert len(sample.prompt_routes) == len(request.prompt) * 12
        known = sample.columns[EXPERT_IDS][:, -1] > 0
        assert len(known) == len(sample.tokens)
        num_unknown += int((~known).sum())
    assert num_unknown == 0
    assert any(len(set(one.versions.tolist())) > 1 for one in done.values())
