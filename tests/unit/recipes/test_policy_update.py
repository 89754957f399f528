"""PolicyUpdate with roles that answer at once: what it calls, in which order, and with what."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from spmd_rl.algo.algorithm import Algorithm
from spmd_rl.algo.make import make_algorithm
from spmd_rl.config.load import load
from spmd_rl.errors import ContractError
from spmd_rl.mesh.split import Placements, plan_split
from spmd_rl.recipes import configs, grpo
from spmd_rl.recipes.policy_update import PolicyUpdate, explained_variance
from spmd_rl.types.batch import Batch
from spmd_rl.types.token_values import TokenValues
from tests.unit.algo.cases import draw_case, groups_of


@dataclass
class Answer:
    """An endpoint that answers at once, and keeps what it was asked."""

    function: Any
    name: str
    log: list[str]

    def call(self, *arguments: Any, **keywords: Any) -> Any:
        self.log.append(self.name)
        return self.function(*arguments, **keywords)

    def start(self, *arguments: Any, **keywords: Any) -> Any:
        value = self.call(*arguments, **keywords)
        return type("Done", (), {"wait": lambda self: value})()


@dataclass
class Role:
    """Trainer, reference or critic; a score is the engine's log-prob less `distance`."""

    name: str
    log: list[str]
    distance: float = 0.0
    batches: list[Batch] = field(default_factory=list)

    def __getattr__(self, name: str) -> Answer:
        return Answer(object.__getattribute__(self, f"_{name}"), f"{self.name}.{name}", self.log)

    def _score(self, batch: Batch) -> TokenValues:
        values = np.where(batch.mask, batch.rollout_logprobs - np.float32(self.distance), 0)
        return TokenValues(values.astype(np.float32), batch.lengths, batch.index)

    def _score_base(self, batch: Batch) -> TokenValues:
        return self._score(batch)

    def _values(self, batch: Batch) -> TokenValues:
        return TokenValues(batch.mask.astype(np.float32) / 2, batch.lengths, batch.index)

    def _train_step(self, batch: Batch, loss: Any, **_: Any) -> dict[str, float]:
        self.batches.append(batch)
        return {"train/loss": 1.0, "train/grad_norm": 2.0, "train/lr": 3.0, "critic/value": 4.0}


class Ctl:
    """A controller that spawns such roles, and links them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.trainer = Role("trainer", self.log)
        self.spawned: dict[str, Role] = {}

    def spawn(self, role: type, cfg: Any, *, on: Any, model: str, name: str) -> Role:
        self.spawned[name] = Role(name, self.log)
        self.log.append(f"spawn {name} on {on.name}: {model}")
        return self.spawned[name]

    def link(self, source: Role, destination: Role) -> Any:
        self.log.append(f"link {source.name} to {destination.name}")
        return type("Link", (), {"push": lambda _, version: self.log.append(f"push {version}")})()


def placements(cfg: grpo.Config) -> Placements:
    return plan_split(cfg.split, 4)


def update(ctl: Ctl, *words: str) -> PolicyUpdate:
    cfg = load(grpo.Config, None, ["model=m", "data=d", *words])
    return PolicyUpdate(ctl, cfg, ctl.trainer, placements(cfg))  # type: ignore[arg-type]


def test_a_config_makes_its_algorithm_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def counted(cfg: grpo.Config, **sampling: Any) -> Algorithm:
        made.append(cfg.algorithm)
        return make_algorithm(cfg, **sampling)

    monkeypatch.setattr(configs, "make_algorithm", counted)
    cfg = load(grpo.Config, None, ["model=m", "data=d", "algorithm=ppo"])
    ctl = Ctl()
    found = PolicyUpdate(ctl, cfg, ctl.trainer, placements(cfg))  # type: ignore[arg-type]
    assert found.algorithm is cfg.made_algorithm
    assert made == ["ppo"]
    assert replace(cfg, algorithm="grpo").made_algorithm is not found.algorithm
    assert made == ["ppo", "grpo"]


def test_an_algorithm_without_needs_calls_the_trainer_once() -> None:
    ctl = Ctl()
    made = update(ctl)
    stats = made.step(groups_of(draw_case(0)), 0)
    assert (ctl.log, made.savers, made.roles) == (["trainer.train_step"], {}, [ctl.trainer])
    assert "train/kl" not in stats


def test_a_trainer_of_adapters_scores_its_own_reference() -> None:
    ctl = Ctl()
    made = update(ctl, "kl.coef=0.1", "trainer.lora.rank=4")
    assert (made.savers, made.roles) == ({}, [ctl.trainer])
    for index in range(2):
        made.step(groups_of(draw_case(0)), index)
    assert ctl.log == [
        "trainer.score_base",
        "trainer.score",  # the reference is the policy at the first step
        "trainer.train_step",
        "trainer.score_base",
        "trainer.train_step",
    ]
    with pytest.raises(ContractError, match="which no push replaces"):
        made.refresh_reference(3)


def test_a_policy_that_begins_with_adapters_is_not_its_reference() -> None:
    ctl = Ctl()
    made = update(ctl, "kl.coef=0.1", "trainer.lora.rank=4", "trainer.lora.folder=adapters")
    made.step(groups_of(draw_case(0)), 0)
    assert ctl.log == ["trainer.score_base", "trainer.train_step"]


@pytest.mark.parametrize(
    ("words", "spawned"),
    [
        (["kl.reference=other"], "spawn reference on train: other"),
        (["kl.reference=m", "trainer.init=random"], "spawn reference on train: m"),
        (["split.train.ranks=2", "split.reference.ranks=1"], "spawn reference on reference: m"),
        (["kl.reference=m"], None),
    ],
)
def test_a_reference_beside_adapters_that_is_not_their_base(
    words: list[str], spawned: str | None
) -> None:
    ctl = Ctl()
    update(ctl, "kl.coef=0.1", "trainer.lora.rank=4", *words)
    assert ctl.log == ([spawned] if spawned else [])


def test_ppo_with_a_reference_on_ranks_of_their_own() -> None:
    ctl = Ctl()
    split = ["split.train.ranks=0-1", "split.critic.ranks=2-2", "split.reference.ranks=3-3"]
    made = update(ctl, "algorithm=ppo", "kl.coef=0.1", *split)
    assert ctl.log == ["spawn reference on reference: m", "spawn critic on critic: m"]
    assert made.savers == ctl.spawned
    ctl.log.clear()
    stats = made.step(groups_of(draw_case(0)), 0)
    assert ctl.log == [
        "critic.values",
        "reference.score",
        "trainer.score",  # the reference is the policy at the first step
        "critic.train_step",
        "trainer.train_step",
    ]
    (batch,), (same,) = ctl.trainer.batches, ctl.spawned["critic"].batches
    assert batch is same
    assert {"reference_logprobs", "values", "returns"} <= batch.columns.keys()
    assert stats["train/loss"] == stats["critic/loss"] == 1.0
    assert (stats["critic/grad_norm"], stats["critic/lr"], stats["critic/value"]) == (2, 3, 4)
    assert stats["train/kl"] == 0


def test_the_critic_warms_up_alone() -> None:
    ctl = Ctl()
    made = update(ctl, "algorithm=ppo", "critic_warmup_steps=2")
    for index in range(3):
        stats = made.step(groups_of(draw_case(0)), index)
        assert ("train/loss" in stats) == (index == 2)
    assert len(ctl.trainer.batches) == 1
    assert len(ctl.spawned["critic"].batches) == 3


def test_the_reference_takes_the_weights_when_it_is_due() -> None:
    ctl = Ctl()
    made = update(ctl, "kl.coef=0.1", "kl.refresh_every=2")
    for index in range(5):
        made.step(groups_of(draw_case(0)), index)
    pushes = [entry for entry in ctl.log if entry.startswith(("link", "push"))]
    assert pushes == ["link trainer to reference", "push 2", "push 4"]


def test_a_reference_that_is_not_the_policy_is_refused_at_the_first_step() -> None:
    ctl = Ctl()
    made = update(ctl, "kl.coef=0.1")
    ctl.spawned["reference"].distance = 0.5
    with pytest.raises(ContractError, match="policy and reference differ before the first step"):
        made.step(groups_of(draw_case(0)), 0)
    stats = made.step(groups_of(draw_case(0)), 1)
    assert stats["train/kl"] == pytest.approx(0.5, abs=1e-6)


def test_a_reference_from_another_folder_may_differ() -> None:
    ctl = Ctl()
    made = update(ctl, "kl.coef=0.1", "kl.reference=other")
    assert ctl.log == ["spawn reference on train: other"]
    ctl.spawned["reference"].distance = 0.5
    assert made.step(groups_of(draw_case(0)), 0)["train/kl"] > 0.4


def test_old_logprobs_are_scored_for_an_algorithm_that_needs_them() -> None:
    ctl = Ctl()
    made = update(ctl)
    made.algorithm = replace(made.algorithm, needs=frozenset({"old_logprobs"}))
    made.step(groups_of(draw_case(0)), 3)
    assert ctl.log == ["trainer.score", "trainer.train_step"]
    assert "old_logprobs" in ctl.trainer.batches[0].columns


def test_the_share_of_groups_that_are_learned_from() -> None:
    ctl = Ctl()
    groups = groups_of(draw_case(0, equal_group=True))
    stats = update(ctl, "algorithm=dapo").step(groups, 0)
    assert stats["train/kept_groups"] == 3 / 4
    (batch,) = ctl.trainer.batches
    assert batch.num_sequences == sum(group.num_samples for group in groups[1:])
    assert "train/kept_groups" not in update(Ctl()).step(groups, 0)


def test_explained_variance() -> None:
    made = update(Ctl())
    batch = made.algorithm.pack(groups_of(draw_case(0)))
    returns = np.where(batch.mask, np.arange(batch.num_tokens), 0).astype(np.float32)

    def explained(values: Any) -> float:
        return explained_variance(batch.with_columns(returns=returns, values=np.float32(values)))

    assert explained(returns) == 1
    assert explained(returns + 1) == pytest.approx(1)  # a constant explains nothing, costs nothing
    assert explained(0 * returns) == pytest.approx(0)
    assert explained(-returns) < -1
