"""The axis ep of FSDP2 before a run: what it does not go with is named."""

from __future__ import annotations

from typing import Any

import pytest

from spmd_rl.errors import ConfigError
from spmd_rl.kernels.moe import deep_ep_buffer
from spmd_rl.kernels.moe.deep_ep_buffer import VERSION, check_deep_ep
from spmd_rl.mesh.split import RoleSplit, plan_split
from spmd_rl.train.config import Fsdp2Config, OptimizerConfig, TrainerConfig
from spmd_rl.train.fsdp2.axes import check_axes
from tests.specs import dense_spec, with_experts

DENSE = dense_spec("qwen3", vocab=50, hidden=32, inner=20, layers=2, heads=(4, 2, 8), positions=64)
MIXTURE = with_experts(DENSE, 6, 2, 20)


def check(cfg: TrainerConfig, spec: Any = MIXTURE, world: int = 4, **axes: int) -> None:
    placement = plan_split({"train": RoleSplit(**axes)}, world).train
    check_axes(cfg, placement, spec)


def test_experts_are_shared_beside_shards_and_copies() -> None:
    for axes in ({"ep": 2}, {"dp": 2, "ep": 2}, {"dp": 4}, {}):
        check(TrainerConfig(deterministic="dp" not in axes), **axes)
    check(TrainerConfig(), DENSE)
    check(TrainerConfig(), None, ep=4)


@pytest.mark.parametrize(
    ("cfg", "sentence"),
    [
        ({"optimizer": OptimizerConfig(kind="muon")}, "trainer.optimizer.kind = 'muon'"),
        ({"optimizer": OptimizerConfig(kind="adamw8bit")}, "trainer.optimizer.kind = 'adamw8bit'"),
        ({"backend": Fsdp2Config(wrap="model")}, "trainer.backend.wrap = 'model': experts are"),
        ({"backend": Fsdp2Config(offload="master")}, "trainer.backend.offload = 'master'"),
    ],
)
def test_a_setting_that_does_not_go_with_it_is_named(cfg: dict[str, Any], sentence: str) -> None:
    check(TrainerConfig(**cfg), world=1)
    with pytest.raises(ConfigError, match=f"split.train.ep = 2 does not go with {sentence}"):
        check(TrainerConfig(**cfg), ep=2)


def test_experts_that_cannot_be_shared_are_named() -> None:
    with pytest.raises(ConfigError, match="ep = 4 does not divide the 6 experts of a layer"):
        check(TrainerConfig(), ep=4)
    with pytest.raises(ConfigError, match="ep = 2: the model has no experts to share"):
        check(TrainerConfig(), DENSE, ep=2)


def test_deep_ep_between_other_numbers_of_ranks_is_refused() -> None:
    cfg = TrainerConfig(backend=Fsdp2Config(ep_dispatcher="deep_ep"))
    check(cfg, ep=2)
    with pytest.raises(ConfigError, match='ep = 3: .*"deep_ep" is for 2, 4, 8 ranks'):
        check(cfg, world=3, ep=3)
    check(TrainerConfig(), world=3, ep=3)


@pytest.mark.parametrize(
    ("num_ranks", "version", "sentence"),
    [
        (3, VERSION, "is for 2, 4, 8 ranks that share experts, not 3"),
        (2, None, f"needs tokenspeed-deepep {VERSION}, not None"),
        (2, "0.1", f"needs tokenspeed-deepep {VERSION}, not 0.1"),
    ],
)
def test_what_deep_ep_needs_is_named(
    num_ranks: int, version: str | None, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deep_ep_buffer, "installed", lambda package: version)
    with pytest.raises(ConfigError, match=sentence):
        check_deep_ep(num_ranks)
