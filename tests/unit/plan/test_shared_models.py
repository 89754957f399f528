"""The plan of engines whose model several ranks share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.shapes import write_config
from spmd_rl.config.dump import as_data
from spmd_rl.config.run import RunConfig
from spmd_rl.errors import ConfigError, PlanError
from spmd_rl.mesh.split import RoleSplit, Split, plan_split
from spmd_rl.model.parts.part import row_shards_of_run
from spmd_rl.model.read import read_spec
from spmd_rl.offload.config import OffloadConfig
from spmd_rl.plan import main
from spmd_rl.plan.resolve import resolve, row_shards
from spmd_rl.recipes.grpo import Config
from spmd_rl.rollout.kinds import EngineConfig
from spmd_rl.rollout.memory import engine_memory
from spmd_rl.rollout.native.config import GPU_STEP_TOKENS, NativeEngineConfig
from spmd_rl.rollout.sglang.config import SglangEngineConfig
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.cost.memory import step_sizes
from spmd_rl.train.megatron.config import MegatronConfig

AWAKE = OffloadConfig(sleep="never")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("8B")
    write_config("8B", folder)
    return folder


def config(model: Path, tp: int, engine: EngineConfig, of_trainer: int = 1) -> Config:
    split = Split(train=RoleSplit(tp=of_trainer), infer=RoleSplit(tp=tp))
    return Config(model=str(model), data="x", split=split, engine=engine)


def test_all_roles_sum_in_as_many_parts_as_ranks_share(model: Path) -> None:
    native, sglang = NativeEngineConfig(), SglangEngineConfig(python="x")
    assert row_shards(config(model, 4, native), 4) == {"train": 4, "infer": 4}
    assert row_shards(config(model, 1, native), 4) == {}
    assert row_shards(config(model, 4, sglang), 4) == {}
    assert row_shards(config(model, 4, native), 2) == {}  # does not fit: the run itself says so
    assert row_shards(config(model, 2, native, of_trainer=4), 4) == {"train": 4, "infer": 4}
    assert row_shards(config(model, 4, sglang, of_trainer=2), 4) == {"train": 2, "infer": 2}
    assert set(row_shards(config(model, 2, native, of_trainer=3), 12).values()) == {2}
    pinned = replace(config(model, 1, native), run=RunConfig(row_shards=4))
    assert row_shards(pinned, 1) == {"train": 4, "infer": 4}
    assert row_shards(replace(config(model, 2, native), run=pinned.run), 4)["infer"] == 4
    assert row_shards_of_run(as_data(pinned)) == 4
    for layers, expected in {"local": {"train": 2, "infer": 2}, "transformer_engine": {}}.items():
        backend = MegatronConfig(layers=layers)
        megatron = replace(config(model, 1, native, 2), trainer=TrainerConfig(backend=backend))
        assert row_shards(megatron, 2) == expected


def test_ranks_have_a_part_of_weights_and_pages(model: Path) -> None:
    spec, cfg = read_spec(model), NativeEngineConfig()
    alone, shared, eight = (
        {one.tag: one.num_bytes for one in engine_memory(spec, cfg, True, tp=tp)}
        for tp in (1, 2, 8)
    )
    whole = 2 * 4096 * (spec.vocab_size + 2 * spec.num_layers + 1) + 2 * 2 * 128 * spec.num_layers
    assert shared["weights"] == (alone["weights"] - whole) // 2 + whole
    assert eight["weights"] == (alone["weights"] - whole) // 8 + whole
    plans = [resolve(config(model, tp, cfg), 8, 80 << 30) for tp in (1, 2)]
    asked = [one.sleep and one.queue for one in plans]
    assert asked[0] is not None and asked[1] is not None


def test_a_rank_has_the_parts_of_its_sums_at_once(model: Path) -> None:
    """They are fp32: of an engine before it exchanges, of a trainer before it has gradients."""
    native, cfg, row = NativeEngineConfig(), TrainerConfig(), 4096 * 4

    def step(shards: int, tp: int) -> int:
        memory = engine_memory(read_spec(model), native, True, tp=tp, row_shards=shards)
        return {one.tag: one.num_bytes for one in memory}["step"]

    def tags(tp: int, of_trainer: int = 1, **others: object) -> dict[str, int]:
        run = replace(config(model, tp, native, of_trainer), offload=AWAKE, **others)
        return {one.tag: one.num_bytes for one in resolve(run, 8).ledgers[0].entries}

    assert [step(shards, 1) - step(1, 1) for shards in (2, 8)] == [
        num_parts * row * GPU_STEP_TOKENS for num_parts in (2, 8)
    ]
    assert [step(shards, 2) - step(2, 2) for shards in (4, 8)] == [
        0,
        2
        * row
        * GPU_STEP_TOKENS,  # four parts and their sum, where two sums of ranks and their own were
    ]
    assert tags(1, 4)["step"] - tags(1)["step"] == 4 * row * GPU_STEP_TOKENS
    alone, spec = plan_split(Split(), 1).train, read_spec(model)
    of_gradients = 2 * spec.blocks[0].cost().gradients
    assert 4 * row < of_gradients < 8 * row
    backward = [
        step_sizes(replace(spec, row_shards=shards), cfg, alone).activations.backward
        for shards in (1, 4, 8)
    ]
    more = cfg.max_tokens * (8 * row - of_gradients)
    assert [one - backward[0] for one in backward] == [0, 0, more]
    megatron = TrainerConfig(backend=MegatronConfig())
    of_megatron = [tags(tp, trainer=megatron)["activations"] for tp in (1, 4)]
    assert of_megatron[1] - of_megatron[0] == 4 * row * megatron.max_tokens


def test_a_frozen_model_and_an_sglang_engine_sum_as_they_do(model: Path) -> None:
    native, sglang = NativeEngineConfig(), SglangEngineConfig(python="x")
    kl = replace(config(model, 1, native).kl, coef=0.1)

    def tags(tp: int, of_trainer: int, engine: EngineConfig, **others: object) -> dict[str, int]:
        run = replace(config(model, tp, engine, of_trainer), offload=AWAKE, **others)
        return {one.tag: one.num_bytes for one in resolve(run, 8).ledgers[0].entries}

    alone, shared = tags(1, 1, native, kl=kl), tags(2, 1, native, kl=kl)
    frozen = "reference activations"
    assert shared[frozen] - alone[frozen] == 2 * 4096 * 4 * TrainerConfig().max_tokens
    assert tags(1, 4, sglang)["step"] == tags(1, 1, sglang)["step"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("split.infer.tp=3 nproc=3", "tp = 3: sums have equal bits over 2, 4 or 8 ranks alone"),
        ("split.infer.tp=2 trainer.lora.rank=4", "tp = 2 does not go with adapters that are"),
        ("split.train.tp=2 trainer.lora.rank=4", "train.tp = 2 does not go with trainer.lora"),
        (
            "split.infer.tp=2 engine.weights=e4m3 trainer.weights=e4m3",
            "tp = 2 does not go with engine.weights = 'e4m3'",
        ),
        ("split.infer.tp=2 run.row_shards=1", "row_shards = 1 is less than split.infer.tp = 2"),
        ("split.train.tp=2 run.row_shards=1", "row_shards = 1 is less than split.train.tp = 2"),
        ("run.row_shards=3", "row_shards = 3: expected 0, 1, 2, 4 or 8"),
        ("run.row_shards=2 trainer.lora.rank=4", "row_shards = 2 does not go with adapters"),
        (
            "run.row_shards=2 engine.weights=e4m3 trainer.weights=e4m3",
            "row_shards = 2 does not go with engine.weights = 'e4m3'",
        ),
        (
            "run.row_shards=2 trainer.backend.kind=megatron "
            "trainer.backend.layers=transformer_engine",
            "row_shards = 2: transformer-engine's layers do not sum",
        ),
    ],
)
def test_what_ranks_do_not_share_is_refused(model: Path, words: str, sentence: str) -> None:
    flags = [f"--{word}" for word in words.split()]
    nproc = [] if "nproc" in words else ["--nproc=2"]
    with pytest.raises((ConfigError, PlanError), match=sentence):
        main(["grpo", f"--model={model}", "--data=x.jsonl", *flags, *nproc])


def test_a_value_heads_ranks_share_matrices(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["reward_model", f"--model={model}", "--data=x.jsonl", "--world=2"]
    assert main([*words, "--split.train.tp=2"]) == 0
    assert "  train    dp 1 x fsdp 1 x tp 2 " in capsys.readouterr().out
