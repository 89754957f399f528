"""Memory of a trainer at each point of a step, for the shape of Qwen3-8B on one GPU."""

from __future__ import annotations

import pytest

from benchmarks.shapes import write_config
from spmd_rl.mesh.split import Placement, Split, plan_split
from spmd_rl.model.spec import ModelSpec
from spmd_rl.train.config import Fsdp2Config, TrainerConfig, Wrap
from spmd_rl.train.cost.memory import fsdp2_memory, step_sizes
from spmd_rl.train.cost.step_memory import StepPoint, step_points, table

GB = 10**9
ONE = plan_split(Split(), 1)["train"]
TOKENS, HIDDEN, LAYERS = 16384, 4096, 36


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return write_config("8B", tmp_path_factory.mktemp("model"))


def config(offload: str, offload_activations: bool = False) -> TrainerConfig:
    backend = Fsdp2Config(recompute="all", offload=offload, offload_activations=offload_activations)
    return TrainerConfig(max_tokens=TOKENS, backend=backend)


def points(spec: ModelSpec, cfg: TrainerConfig, placement: Placement = ONE) -> dict[str, StepPoint]:
    sizes = step_sizes(spec, cfg, placement)
    return {point.name: point for point in step_points(sizes, cfg.backend.offload)}


def test_master_weights_are_on_the_gpu_only_where_they_are_read_or_written(spec: ModelSpec) -> None:
    at = points(spec, config("master"))
    assert {name: "master" in point.gpu for name, point in at.items()} == {
        "gather": True,
        "head": False,
        "backward": False,
        "reduce": False,
        "update": True,
    }
    fp32 = 4 * spec.num_parameters
    assert at["update"].gpu["master"] == at["update"].gpu["grads"] == fp32
    assert at["head"].gpu["gathered"] == fp32 // 2
    assert all(point.host["moments"] == 2 * fp32 for point in at.values())
    assert all(point.host["master"] == fp32 for point in at.values())


@pytest.mark.parametrize(
    ("offload", "least", "most"), [("none", 150, 170), ("moments", 92, 102), ("master", 60, 70)]
)
def test_the_peak_of_8b_fits_an_80_gb_gpu_with_master_alone(
    spec: ModelSpec, offload: str, least: int, most: int
) -> None:
    at = points(spec, config(offload))
    peak = max(point.gpu_bytes for point in at.values())
    assert least * GB < peak < most * GB
    memory = fsdp2_memory(spec, config(offload), ONE)
    assert sum(item.num_bytes for item in memory if not item.is_away_in_work) == peak
    by_tag = {item.tag: item for item in memory}
    assert by_tag["master"].num_bytes == 4 * spec.num_parameters
    assert by_tag["moments"].num_bytes + by_tag["moments"].host_bytes == 8 * spec.num_parameters


def test_the_host_of_8b_has_128_gib(spec: ModelSpec) -> None:
    host = max(point.host_bytes for point in points(spec, config("master", True)).values())
    assert 12 * spec.num_parameters < host < 110 << 30


def test_offloaded_activations_leave_a_few_layers_on_the_gpu(spec: ModelSpec) -> None:
    before, after = (points(spec, config("master", one))["head"] for one in (False, True))
    pair = 2 * TOKENS * HIDDEN * 2
    assert before.gpu["activations"] - after.gpu["activations"] == (LAYERS - 3) * pair
    assert after.host["activations"] == (LAYERS - 1) * pair
    assert before.host["activations"] == 0


@pytest.mark.parametrize(("wrap", "whole"), [("layer", False), ("model", True)])
def test_gradients_of_one_unit_are_whole_until_they_are_reduced(
    spec: ModelSpec, wrap: Wrap, whole: bool
) -> None:
    cfg = TrainerConfig(max_tokens=TOKENS, backend=Fsdp2Config(recompute="all", wrap=wrap))
    at = points(spec, cfg, plan_split(Split(), 4)["train"])
    shard = spec.num_parameters
    assert at["backward"].gpu["grads"] == at["reduce"].gpu["grads"] == (4 if whole else 1) * shard
    assert at["update"].gpu["grads"] == shard


def test_a_table_has_each_point_and_class(spec: ModelSpec) -> None:
    cfg = config("master", True)
    lines = list(table(step_points(step_sizes(spec, cfg, ONE), "master")))
    assert lines[0].split() == ["GPU", "gather", "head", "backward", "reduce", "update"]
    rows = {line.split()[0]: line for line in lines}
    assert rows["master"].count("30.51 GiB") == 5
    assert rows["chunks"].split()[1:] == ["-", "-", "-", "-", "384.0", "MiB"]
    assert sum(line.split()[0] == "all" for line in lines) == 2
