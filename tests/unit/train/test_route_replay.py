"""Routes that an engine recorded: they stay with their tokens, and trainers replay them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import spmd_rl as rl
from spmd_rl.algo.losses import grpo_loss
from spmd_rl.errors import ConfigError, ContractError
from spmd_rl.kernels import PackedAttention
from spmd_rl.kernels.moe.kept_routes import kept_routes
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.model.hf import random_weights
from spmd_rl.model.layers.route_shape import RouteShape
from spmd_rl.model.lora import LoraConfig
from spmd_rl.model.network import CausalLM
from spmd_rl.model.read import read_spec
from spmd_rl.observe.samples_file import samples_as_json_lines
from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.group_queue import QueuedGroup
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.native.engine import NativeEngine
from spmd_rl.rollout.sampler_file import SamplerState, read_state, write_state
from spmd_rl.train.config import FrozenConfig
from spmd_rl.train.frozen import FrozenModel
from spmd_rl.train.trainer import Trainer
from spmd_rl.types.batch import Batch
from spmd_rl.types.groups import Group
from spmd_rl.types.routes import EXPERT_IDS
from spmd_rl.types.samples import Sample
from tests.dist.train_case import VOCAB, local_weights, write_model_folder
from tests.samples import Samples, finish

MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
    },
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "n_group": 3,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.8,
    },
    "many experts": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 260,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 4,
        "num_hidden_layers": 1,
    },
}
SMALL = ["qwen3_moe", "glm4_moe"]
SAMPLING = SamplingConfig(num_samples=3, max_tokens=20, ignore_eos=True, replay_routes=True)
PROMPTS = [rl.Prompt(uid, (np.arange(2 + 5 * uid) % 9 + 2).astype(np.int32)) for uid in range(4)]
FLIPS, DLOGP = "onpolicy/router_flips", "onpolicy/mean_abs_dlogp"
REROUTED = ["experts/rerouted", "experts/rerouted_worst"]
NewTrainer = Callable[..., Trainer]


def folder_of(root: Path, name: str) -> Path:
    folder = write_model_folder(root)
    config = json.loads((folder / "config.json").read_text())
    family = "glm4_moe" if name == "glm4_moe" else "qwen3_moe"
    (folder / "config.json").write_text(
        json.dumps(config | {"model_type": family} | MIXTURES[name])
    )
    return folder


@pytest.fixture(params=list(MIXTURES))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return folder_of(tmp_path / "model", request.param)


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    return folder_of(tmp_path / "model", "qwen3_moe")


def new_model(folder: Path, noise: float = 0.0) -> CausalLM:
    """The weights of a trainer with its default seed, and noise on the routers'."""
    model = CausalLM(spec := read_spec(folder))
    model.load_state_dict(dict(random_weights(spec, 0)))
    generator = torch.Generator().manual_seed(1)
    for name, one in model.named_parameters():
        if name.endswith("gate.weight"):
            one.data += noise * torch.randn(one.shape, generator=generator)
    return model.requires_grad_(False)


def new_engine(model: CausalLM, **options: Any) -> NativeEngine:
    options = {"max_batch": 6, "page_size": 4, "max_step_tokens": 8} | options
    engine = NativeEngine(model, NativeEngineConfig(**options), torch.device("cpu"))
    engine.sink().commit(0)
    return engine


def requests(sampling: SamplingConfig = SAMPLING) -> list[Request]:
    return [
        Request(prompt.uid, index, prompt.tokens, sampling, seed=1)
        for prompt in PROMPTS
        for index in range(sampling.num_samples)
    ]


def groups_of(drawn: Samples) -> list[Group]:
    return [
        Group(prompt, [drawn[prompt.uid, one].replace(reward=float(one)) for one in range(3)])
        for prompt in PROMPTS
    ]


def batch_of(drawn: Samples) -> Batch:
    groups = groups_of(drawn)
    return rl.pack(groups, rl.group_advantage(groups))


def routes_of(model: CausalLM, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    """The experts of each token, in one pass over the whole sequence. Shape: [T, W]."""
    ids, shape = torch.tensor(tokens), RouteShape.required(model.spec)
    attend = PackedAttention(np.array([len(ids)], np.int32), device=torch.device("cpu"))
    with torch.no_grad(), kept_routes() as kept:
        model(ids, torch.arange(len(ids)), attend)
    return kept.joined(getattr(torch, shape.dtype.name)).numpy()[: len(ids)]


def check(model: CausalLM, sample: Sample) -> None:
    """Compare what was recorded with one pass over the prompt and the answer."""
    shape, prompt = RouteShape.required(model.spec), PROMPTS[sample.prompt_uid].tokens
    expected = routes_of(model, [*prompt, *sample.tokens])
    column = sample.columns[EXPERT_IDS]
    assert column.dtype == shape.dtype
    np.testing.assert_array_equal(column, expected[len(prompt) - 1 : -1])
    before = np.frombuffer(sample.prompt_routes, shape.dtype).reshape(len(prompt), -1)
    assert not before[0].any()
    np.testing.assert_array_equal(before[1:], expected[: len(prompt) - 1])


@pytest.mark.parametrize(
    "options",
    [{}, {"prefix_cache": False}, {"num_pages": 12}, {"max_step_tokens": 64, "max_batch": 2}],
    ids=["chunks", "no prefixes", "preempted", "few rows"],
)
def test_an_engine_records_what_one_pass_chooses(folder: Path, options: dict[str, Any]) -> None:
    engine = new_engine(model := new_model(folder), **options)
    drawn = finish(engine, requests())
    assert (engine.stats()["num_preemptions"] > 0) == ("num_pages" in options)
    for sample in drawn.values():
        check(model, sample)
    for sample in finish(engine, requests()).values():  # whose prompts the cache may have
        check(model, sample)


def test_it_is_off_by_default_and_beside_others_alone(qwen: Path) -> None:
    plain = replace(SAMPLING, replay_routes=False)
    assert not SamplingConfig().replay_routes
    drawn = finish(new_engine(new_model(qwen)), requests(plain))
    assert not any(EXPERT_IDS in one.columns or one.prompt_routes for one in drawn.values())
    recorded = finish(new_engine(new_model(qwen)), requests())
    for name, sample in recorded.items():
        assert sample.tokens.tobytes() == drawn[name].tokens.tobytes()
        assert sample.logprobs.tobytes() == drawn[name].logprobs.tobytes()


def test_a_stale_token_keeps_the_routes_of_the_version_that_drew_it(qwen: Path) -> None:
    old, new = new_model(qwen), new_model(qwen, noise=0.5)
    first, second = new_engine(old), new_engine(new, num_pages=12)
    second.sink().commit(1)
    for request in requests():
        first.submit(request)
    done = {}
    for _ in range(14):
        done |= {(one.prompt_uid, one.index): one for one in first.step().finished}
    partial = {(one.prompt_uid, one.index): one for one in first.abort()}
    again = [
        request.resumed(partial[request.uid, request.index])
        for request in requests()
        if (request.uid, request.index) in partial
    ]
    finished = finish(second, again)
    assert second.stats()["num_preemptions"] > 0
    num_mixed = 0
    for name, sample in finished.items():
        began = partial[name]
        size, prompt = len(began.tokens), PROMPTS[sample.prompt_uid].tokens
        np.testing.assert_array_equal(
            sample.columns[EXPERT_IDS][:size], began.columns.get(EXPERT_IDS, np.zeros((0, 9)))
        )
        # the later tokens have those of the new weights, over the whole history
        expected = routes_of(new, [*prompt, *sample.tokens])[len(prompt) - 1 : -1]
        np.testing.assert_array_equal(sample.columns[EXPERT_IDS][size:], expected[size:])
        if size:
            assert sample.prompt_routes == began.prompt_routes
            num_mixed += not np.array_equal(sample.columns[EXPERT_IDS], expected)
    assert num_mixed > 3  # routes of both versions are in one sample


@pytest.mark.parametrize(
    ("folder", "recompute"),
    [*product(SMALL, ["none", "cheap", "all"]), ("many experts", "none")],
    indirect=["folder"],
)
def test_with_equal_weights_replay_changes_no_bit(
    folder: Path, new_trainer: NewTrainer, recompute: str
) -> None:
    drawn = finish(new_engine(new_model(folder)), requests())
    batch = batch_of(drawn)
    without = {name: one for name, one in batch.columns.items() if name != EXPERT_IDS}
    ended = []
    for one in (batch, replace(batch, columns=without)):
        trainer = new_trainer(model=folder, recompute=recompute, max_tokens=90, eps=1e-15)
        metrics = trainer.train_step(one, grpo_loss)
        assert metrics[FLIPS] == metrics["onpolicy/mismatched_tokens"] == 0
        assert ([metrics[name] for name in REROUTED] == [0, 0]) if one is batch else True
        ended.append((metrics, local_weights(trainer)))
    (replayed, weights), (own, others) = ended
    assert {name for name in replayed if name not in own} == set(REROUTED)
    names = [name for name in own if not name.startswith("perf/")]
    assert [replayed[name] for name in names] == [own[name] for name in names]
    for name, one in weights.items():
        assert torch.equal(one.local, others[name].local), name


@pytest.mark.parametrize(
    ("folder", "minibatches"), [*product(SMALL, [1, 3]), ("many experts", 3)], indirect=["folder"]
)
def test_replay_brings_an_engine_with_another_router_nearer(
    folder: Path, new_trainer: NewTrainer, minibatches: int
) -> None:
    drawn = finish(new_engine(new_model(folder, noise=0.05)), requests())
    batch = batch_of(drawn)
    without = {name: one for name, one in batch.columns.items() if name != EXPERT_IDS}
    found = {
        is_replayed: new_trainer(
            model=folder, max_tokens=90, minibatches=minibatches, lr=1e-6
        ).train_step(one, grpo_loss)
        for is_replayed, one in ((True, batch), (False, replace(batch, columns=without)))
    }
    assert 0 < found[True]["experts/rerouted"] <= found[True]["experts/rerouted_worst"] < 1
    assert found[False][FLIPS] > 0 and found[True][FLIPS] > 0
    assert found[True][DLOGP] < 0.8 * found[False][DLOGP]


def test_the_trainers_score_replays_and_a_references_does_not(
    qwen: Path, new_trainer: NewTrainer, context: RoleContext
) -> None:
    batch = batch_of(finish(new_engine(new_model(qwen, noise=0.2)), requests()))
    without = {name: one for name, one in batch.columns.items() if name != EXPERT_IDS}
    plain, trainer = replace(batch, columns=without), new_trainer(model=qwen)
    replayed, own = trainer.score(batch).values, trainer.score(plain).values
    assert not np.array_equal(replayed, own)
    reference = FrozenModel(FrozenConfig(init="random"), context, str(qwen))
    assert np.array_equal(reference.score(batch).values, own)
    top = trainer.top_logprobs(batch, VOCAB)
    at = (top.ids.values == batch.tokens[:, None]) & batch.mask[:, None]
    np.testing.assert_allclose(top.logprobs.values[at], replayed[batch.mask], atol=1e-5)
    adapted = new_trainer(model=qwen, lora=LoraConfig(rank=2))
    assert np.array_equal(adapted.score_base(batch).values, adapted.score_base(plain).values)


def test_routes_survive_checkpoints_and_files(qwen: Path, tmp_path: Path) -> None:
    drawn = finish(new_engine(model := new_model(qwen)), requests())
    groups = groups_of(drawn)
    entries = [QueuedGroup(one.prompt, 0, group=one) for one in groups[1:]]
    entries.append(QueuedGroup(groups[0].prompt, 0, partial=groups[0].samples))
    write_state(str(tmp_path / "sampler"), SamplerState(1, entries, [], {}))
    for entry in read_state(str(tmp_path / "sampler")).entries:
        for sample in entry.group.samples if entry.group else entry.partial:
            check(model, sample)
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "step_00001.jsonl").write_text(samples_as_json_lines(groups))
    for group in rl.read_groups(tmp_path, 1):
        for sample in group.samples:
            check(model, sample)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids: ids[:, :-1], r"uint8 with \[8\] values a token: expected uint8 with 9"),
        (lambda ids: ids.astype(np.uint16), r"uint16 with \[9\] values a token: expected uint8"),
        (lambda ids: np.where(ids == 6, 7, ids).astype(np.uint8), "different experts below 7"),
        (lambda ids: np.ascontiguousarray(ids[:, ::-1]), "expected ascending ids"),
        (lambda ids: np.minimum(ids, 1), r"has \[.*\] for token \d+ in the mixture \d"),
    ],
)
def test_routes_of_another_model_are_refused(
    qwen: Path, new_trainer: NewTrainer, change: Callable[[Any], Any], message: str
) -> None:
    batch = batch_of(finish(new_engine(new_model(qwen)), requests()))
    columns = batch.columns | {EXPERT_IDS: change(batch.columns[EXPERT_IDS])}
    trainer = new_trainer(model=qwen)
    with pytest.raises(ContractError, match=message):
        trainer.train_step(replace(batch, columns=columns), grpo_loss)
    with pytest.raises(ContractError, match=message):
        trainer.score(replace(batch, columns=columns))


def test_prompts_whose_routes_are_cut_are_refused(qwen: Path) -> None:
    drawn = finish(new_engine(new_model(qwen)), requests())
    short = {name: one.replace(prompt_routes=one.prompt_routes[:-1]) for name, one in drawn.items()}
    with pytest.raises(ContractError, match="expected 9 for each of the 2 tokens before it"):
        batch_of(short)


def test_models_without_routes_are_refused(
    qwen: Path, model_folder: Path, new_trainer: NewTrainer
) -> None:
    dense = new_engine(new_model(model_folder))
    with pytest.raises(ConfigError, match=r"sampling\.replay_routes needs mixtures"):
        dense.submit(requests()[0])
    batch = batch_of(finish(new_engine(new_model(qwen)), requests()))
    with pytest.raises(ContractError, match="FSDP2 alone replays them"):
        new_trainer(model=model_folder).train_step(batch, grpo_loss)
