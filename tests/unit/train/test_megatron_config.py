"""Settings of the Megatron-core backend, and the layouts that it refuses before a run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from spmd_rl.errors import ConfigError, PlanError
from spmd_rl.mesh.split import RoleSplit, Split, plan_split
from spmd_rl.model.layers.moe import Moe
from spmd_rl.model.read import read_spec
from spmd_rl.model.spec import ModelSpec
from spmd_rl.plan.axes import check_axes
from spmd_rl.plan.needs import RunNeeds
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.sglang.config import SglangEngineConfig
from spmd_rl.train.config import FrozenConfig, TrainerConfig, fsdp2_settings
from spmd_rl.train.megatron import model
from spmd_rl.train.megatron.config import OWNED, MegatronConfig, check_layout
from tests.backends.megatron_case import FAMILIES, SIZES
from tests.specs import dense_spec, with_experts, with_layers
from tests.unit.model.test_glm4_moe import BASE as GLM4_MOE

SPEC = dense_spec(
    "llama", vocab=960, hidden=64, inner=120, layers=12, heads=(12, 6, 16), positions=64
)
MOE = with_experts(SPEC, num_experts=8, experts_per_token=2, expert_size=32)
TIED = replace(SPEC, tie_embeddings=True)


@pytest.mark.parametrize(
    ("spec", "axes", "settings", "sentence"),
    [
        (SPEC, {"tp": 5}, {}, "split.train.tp = 5 does not divide the 12 attention heads"),
        (
            with_layers(SPEC, intermediate_size=125),
            {"tp": 2},
            {},
            "the 125 hidden units of the MLP",
        ),
        (
            SPEC,
            {"tp": 4},
            {},
            "split.train.tp = 4 neither divides the 6 key-value heads nor is a multiple of them",
        ),
        (replace(SPEC, vocab_size=100), {"tp": 12}, {}, "without a token of the vocabulary of 100"),
        (SPEC, {"pp": 16}, {}, "split.train.pp = 16 is more than the model's 12 layers"),
        (SPEC, {"pp": 5}, {}, "split.train.pp = 5 does not divide the model's 12 layers"),
        (SPEC, {"pp": 4}, {"chunks": 2}, "pp = 4 x trainer.backend.chunks = 2 does not divide"),
        (SPEC, {}, {"chunks": 2}, "chunks = 2 needs a pipeline: set split.train.pp"),
        (SPEC, {}, {"sequence_parallel": True}, "needs tensor parallelism: set split.train.tp"),
        (
            SPEC,
            {"cp": 4},
            {},
            "split.train.cp = 4 does not divide the 6 key-value heads, which local layers share",
        ),
        (SPEC, {"tp": 2, "cp": 2}, {}, "the 3 key-value heads that split.train.tp = 2 leaves on a"),
        (SPEC, {"ep": 2}, {}, "split.train.ep = 2: the model has no experts"),
        (SPEC, {"etp": 2}, {}, "split.train.etp = 2: the model has no experts"),
        (MOE, {"etp": 3}, {}, "split.train.etp = 3 does not divide the 32 "),
        (MOE, {"etp": 2}, {"ep_dispatcher": "deep_ep"}, 'set it to "torch"'),
        (MOE, {"ep": 3}, {}, "split.train.ep = 3 does not divide the model's 8 experts"),
        (MOE, {}, {"ep_dispatcher": "deep_ep"}, "needs expert parallelism: set split.train.ep"),
        (MOE, {"tp": 2}, {}, "with experts needs trainer.backend.sequence_parallel = true"),
        (TIED, {"pp": 2}, {}, "with tied embeddings needs trainer.backend.distributed_optimizer"),
        (with_layers(SPEC, bias=True), {}, {}, "the model has biases outside of its queries"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(
    spec: ModelSpec, axes: dict[str, int], settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)) as caught:
        check_layout(spec, axes, MegatronConfig(**settings), "train")
    assert str(caught.value).count(". ") == 0, "one sentence"


def test_deep_ep_is_the_flex_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked first whether it can run here, which it cannot."""
    cfg, asked = MegatronConfig(ep_dispatcher="deep_ep"), []
    with pytest.raises(ConfigError, match="deep_ep"):
        model._expert_options({"ep": 4}, cfg)
    monkeypatch.setattr(model, "check_deep_ep", asked.append)
    found = model._expert_options({"ep": 4}, cfg)
    assert found.items() > model._expert_options({"ep": 4}, MegatronConfig()).items()
    assert found["moe_token_dispatcher_type"] == "flex"
    assert found["moe_flex_dispatcher_backend"] == "deepep"
    assert asked == [4]


@pytest.mark.parametrize(
    ("spec", "axes", "settings"),
    [
        (SPEC, {"tp": 12, "pp": 3}, {"sequence_parallel": True}),
        (SPEC, {"tp": 2, "cp": 3}, {}),
        (SPEC, {"tp": 12, "cp": 4}, {"layers": "transformer_engine"}),
        (SPEC, {"tp": 6, "pp": 3}, {"chunks": 4}),
        (MOE, {"tp": 2, "ep": 8}, {"sequence_parallel": True}),
        (MOE, {"ep": 2, "etp": 4}, {}),
        (TIED, {"pp": 2}, {"distributed_optimizer": False}),
    ],
)
def test_a_layout_that_can_be_is_taken(
    spec: ModelSpec, axes: dict[str, int], settings: dict[str, Any]
) -> None:
    check_layout(spec, axes, MegatronConfig(**settings), "train")


@pytest.mark.parametrize("table", OWNED)
def test_options_that_we_own_are_refused_with_the_reason(table: str) -> None:
    for name, reason in OWNED[table].items():
        with pytest.raises(ConfigError) as caught:
            MegatronConfig(**{table: {name: 1}})
        assert f"trainer.backend.{table}.{name}" in str(caught.value)
        assert reason in str(caught.value)
    MegatronConfig(
        model_options={"recompute_granularity": "full"}, ddp_options={"overlap_grad_reduce": True}
    )


@dataclass(frozen=True)
class Recipe:
    model: str
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    split: Split = field(default_factory=lambda: Split(RoleSplit(tp=2)))


def test_axes_are_checked_before_a_run(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES | FAMILIES["qwen3"]))
    plain = Recipe(str(tmp_path))
    megatron = replace(plain, trainer=TrainerConfig(backend=MegatronConfig()))
    placements = plan_split(plain.split, 4)
    check_axes(RunNeeds.of(megatron), placements)
    with pytest.raises(PlanError, match="FSDP2 has the axes dp, fsdp, cp, tp and ep alone"):
        check_axes(RunNeeds.of(plain), plan_split(Split(RoleSplit(pp=2)), 4))
    with pytest.raises(ConfigError, match="does not divide the 4 attention heads"):
        check_axes(RunNeeds.of(megatron), plan_split(Split(RoleSplit(tp=3)), 3))
    with pytest.raises(PlanError, match=r"split\.infer\.pp = 2: this role has the axes"):
        check_axes(RunNeeds.of(megatron), plan_split(Split(infer=RoleSplit(pp=2)), 4))


def test_a_mixture_of_experts_is_read(tmp_path: Any) -> None:
    config = SIZES | FAMILIES["qwen3_moe"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_spec(tmp_path)
    moe = spec.blocks[0].mlp
    assert isinstance(moe, Moe)
    assert (moe.num_experts, moe.experts_per_token, moe.expert_size) == (4, 2, 24)
    assert "model.layers.3.mlp.experts.3.up_proj.weight" in spec.parameter_shapes()
    assert "model.layers.3.mlp.up_proj.weight" not in spec.parameter_shapes()
    for other in ({"model_type": "mixtral", "num_local_experts": 8}, {"model_type": "qwen2_moe"}):
        (tmp_path / "config.json").write_text(json.dumps(config | other))
        with pytest.raises(ConfigError, match="of mixtures of experts, qwen3_moe and glm4_moe are"):
            read_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"mlp_only_layers": [0]}))
    blocks = read_spec(tmp_path).blocks
    assert [isinstance(one.mlp, Moe) for one in blocks] == [False, *[True] * (len(blocks) - 1)]


def test_sglang_generates_with_mixtures_whose_routers_have_no_corrections(tmp_path: Any) -> None:
    placements = plan_split(Split(), 1)
    needs = RunNeeds(model=str(tmp_path), trainer=TrainerConfig(), engine=NativeEngineConfig())
    with_sglang = replace(needs, engine=SglangEngineConfig())
    (tmp_path / "config.json").write_text(json.dumps(SIZES | FAMILIES["qwen3_moe"]))
    check_axes(needs, placements)
    check_axes(with_sglang, placements)
    (tmp_path / "config.json").write_text(json.dumps(GLM4_MOE))
    check_axes(needs, placements)
    with pytest.raises(ConfigError, match="corrections, which engine.kind = 'sglang' does not"):
        check_axes(with_sglang, placements)


def test_the_config_of_another_backend_stays_apart() -> None:
    trainer = TrainerConfig(backend=MegatronConfig())
    assert FrozenConfig.like(trainer).wrap == "auto"
    with pytest.raises(ConfigError, match=r"kind = 'megatron' trains no value head"):
        fsdp2_settings(trainer)


def test_a_missing_package_is_an_error_that_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['megatron'] = None\n"
        "from spmd_rl.errors import ConfigError\n"
        "from spmd_rl.train.megatron.library import prepare_megatron\n"
        "try: prepare_megatron()\n"
        "except ConfigError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "needs megatron-core" in done.stdout
    assert "pip install -e '.[megatron]'" in done.stdout


def test_the_start_of_a_run_names_the_layers() -> None:
    assert "its local layers" in MegatronConfig().describe()
    assert "transformer-engine" in MegatronConfig(layers="transformer_engine").describe()
