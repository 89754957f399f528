"""A reference and a critic in the plan of a run, against sizes worked out by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import pytest

from spmd_rl.config.load import load
from spmd_rl.controller.endpoint import Role
from spmd_rl.errors import PlanError
from spmd_rl.mesh.split import Placement, PolicySplit, RoleSplit, plan_split
from spmd_rl.offload.ledger import Ledger, TagBytes
from spmd_rl.offload.phases import ALL, COLOCATED, Phases
from spmd_rl.plan.resolve import RunPlan, planned_settings, resolve
from spmd_rl.plan.text import lines
from spmd_rl.recipes import grpo
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.train.config import FrozenConfig, TrainerConfig
from spmd_rl.train.extra_role import ExtraRole

SMALL = {
    "model_type": "qwen3",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
HEAD = 1000 * 64
LAYER = 64 * (16 * (4 + 2 * 2) + 16 * 4 + 3 * 96) + 2 * 64 + 2 * 16
PARAMETERS = 2 * HEAD + 3 * LAYER + 64
LAYER_ELEMENTS = 4 * 64 + 3 * (4 + 2) * 16 + 3 * 96  # that a token has in one layer
BF16 = ("trainer.dtype=bfloat16", "engine.dtype=bfloat16", "engine.num_pages=9")


@dataclass(frozen=True)
class Config(grpo.Config):
    split: PolicySplit = field(default_factory=PolicySplit)
    judge: TrainerConfig | None = None
    frozen: FrozenConfig | None = None

    def extra_roles(self) -> list[ExtraRole]:
        roles = []
        if self.frozen is not None:
            roles.append(ExtraRole("reference", self.frozen, self.model, is_refreshed=True))
        if self.judge is not None:
            roles.append(ExtraRole("critic", self.judge, self.model))
        return roles


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return tmp_path


def configured(model: Path, *words: str, **roles: object) -> Config:
    split = load(Config, None, [f"model={model}", "data=none.jsonl", *words])
    return replace(split, **roles)


def planned(model: Path, world_size: int, *words: str, **roles: object) -> RunPlan:
    return resolve(configured(model, *words, **roles), world_size)


def entries(ledger: Ledger) -> dict[str, tuple[int, tuple[str, ...]]]:
    """The bytes of each entry, and the phases in which it is resident."""
    return {
        entry.tag: (entry.num_bytes, ledger.phases if entry.phases is None else entry.phases)
        for entry in ledger.entries
    }


def test_a_frozen_model_holds_weights_alone_in_the_dtype_of_its_forward_pass(model: Path) -> None:
    for dtype, item in (("bfloat16", 2), ("float32", 4)):
        frozen = FrozenConfig(dtype=dtype)
        found = entries(planned(model, 2, *BF16, frozen=frozen).ledgers[0])
        # a phase that does not need it has another role of its ranks awake
        assert found["reference weights"] == (PARAMETERS // 2 * item, ("train",))
        assert not {"reference master", "reference moments", "reference grads"} & found.keys()


def test_a_critic_is_a_trainer_without_the_head_of_a_language_model(model: Path) -> None:
    found = entries(planned(model, 2, *BF16, judge=TrainerConfig()).ledgers[0])
    own = PARAMETERS - HEAD + 64
    assert found["critic master"] == (own // 2 * 4, ("train",))
    assert found["critic moments"] == (own // 2 * 8, ("train",))
    words = (*BF16, "offload.sleep=never")
    awake = entries(planned(model, 2, *words, judge=TrainerConfig()).ledgers[0])
    assert awake["critic master"] == (own // 2 * 4, ("sync", "eval", "rollout", "train"))


def test_a_trainer_of_adapters_needs_no_reference(model: Path) -> None:
    words = [f"model={model}", "data=none.jsonl", "kl.coef=0.1", *BF16]
    for more, has_reference in ([], True), (["trainer.lora.rank=4"], False):
        plan = resolve(load(grpo.Config, None, [*words, *more]), 2)
        assert ("reference" in {role.name for role in plan.roles}) == has_reference
        assert ("reference weights" in entries(plan.ledgers[0])) == has_reference


def test_an_engine_keeps_adapters_and_the_bytes_of_its_base(model: Path) -> None:
    words = [f"model={model}", "data=none.jsonl", *BF16, "offload.sleep=always"]
    plain, adapted = (
        resolve(load(grpo.Config, None, [*words, *more]), 2).ledgers[0]
        for more in ([], ["trainer.lora.rank=4"])
    )
    num_adapted = 3 * 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 96))  # in 3 layers, of rank 4
    assert entries(adapted)["adapters"] == (2 * num_adapted, adapted.phases)
    assert "adapters" not in entries(plain)
    host = [{one.tag: one.host_bytes for one in ledger.entries} for ledger in (plain, adapted)]
    assert [of["weights"] for of in host] == [0, 2 * PARAMETERS]


def test_a_merged_push_brings_whole_weights(model: Path) -> None:
    """The engine is that of a run without adapters; the trainer's base is awake in the push."""
    words = [f"model={model}", "data=none.jsonl", *BF16, "offload.sleep=always"]
    lora = ["trainer.lora.rank=4", "trainer.lora.targets=['q_proj', 'down_proj']"]
    plain, adapted, merged = (
        resolve(load(grpo.Config, None, [*words, *more]), 2)
        for more in ([], lora, [*lora, "trainer.lora.merged_push=true"])
    )
    plans = [entries(plan.ledgers[0]) for plan in (plain, adapted, merged)]
    assert plans[2]["weights"] == plans[0]["weights"]
    assert "adapters" not in plans[2]
    assert merged.push is not None and adapted.push is not None
    assert merged.push == plain.push
    assert merged.push.copy_bytes > 10 * adapted.push.copy_bytes
    assert plans[1]["base"] == (PARAMETERS, ("train",)), "two shards of 2 bytes a parameter"
    assert plans[2]["pushed_base"] == (PARAMETERS, ("sync", "train"))
    gathered = 3 * 4 * (64 + 96)  # all of A, of rank 4, in 3 layers
    assert plans[2]["merge"][0] == 4 * (gathered + 64 * 96 // 2)
    host = {one.tag: one.host_bytes for one in merged.ledgers[0].entries}
    assert (host["weights"], host["pushed_base"]) == (0, PARAMETERS)


@pytest.mark.parametrize("weights", ["e4m3", "int4"])
def test_a_push_of_adapters_brings_no_codes(model: Path, weights: str) -> None:
    words = [f"model={model}", "data=none.jsonl", *BF16, "trainer.lora.rank=4"]
    codes = [f"{role}.weights={weights}" for role in ("trainer", "engine")]
    plain, coded = (
        resolve(load(grpo.Config, None, [*words, *more]), 2).push for more in ([], codes)
    )
    assert plain == coded and plain is not None and plain.copy_bytes > 0


def working(ledger: Ledger, role: str) -> int:
    return sum(entry.num_bytes for entry in ledger.entries if entry.is_work and entry.role == role)


def test_roles_compute_in_turn(model: Path) -> None:
    """What a role needs only while it computes counts where no other role on its ranks needs
    more.
    """
    plain = planned(model, 2, *BF16).ledgers[0]
    same = planned(model, 2, *BF16, judge=TrainerConfig()).ledgers[0]
    kept = sum(entry.num_bytes for entry in same.entries if entry.role == "critic")
    kept -= working(same, "critic")
    assert 0 < working(same, "critic") < working(plain, "train")
    assert same.resident_bytes("train") == plain.resident_bytes("train") + kept
    larger = TrainerConfig(max_tokens=10 * 16384)
    found = planned(model, 2, *BF16, judge=larger, frozen=FrozenConfig()).ledgers[0]
    counted = {entry.role for entry in found.counted("train") if entry.is_work}
    assert counted == {"critic"}


def test_a_forward_pass_needs_one_layer_and_the_logits(model: Path) -> None:
    """On a rank of its own, where nothing else computes, and so nothing sleeps."""
    words = ("split.train.ranks=1", "split.infer.ranks=1", "split.reference.ranks=1")
    frozen = FrozenConfig(max_tokens=100, logit_rows=10, wrap="layer", dtype="bfloat16")
    found = planned(model, 3, *BF16, *words, frozen=frozen)
    hidden, logits = 100 * 2 * 2 * 64, 2 * 10 * 1000 * 4
    always = ("sync", "eval", "rollout", "train")
    own = {tag: entry for tag, entry in entries(found.ledgers[2]).items() if "reference" in tag}
    assert own == {
        "reference weights": (PARAMETERS * 2, always),
        "reference gathered": ((PARAMETERS - LAYER) * 2, ("train",)),
        "reference activations": (
            max(hidden + logits, 100 * 2 * LAYER_ELEMENTS),
            ("train",),
        ),
    }
    assert "reference weights" not in entries(found.ledgers[0])


def test_a_frozen_model_that_is_gathered_whole_is_there_twice_in_its_first_pass(
    model: Path,
) -> None:
    words = ("split.train.ranks=2", "split.infer.ranks=2", "split.reference.ranks=2")
    for wrap, copies in (("model", PARAMETERS * 2), ("layer", None)):
        found = planned(model, 6, *BF16, *words, frozen=FrozenConfig(wrap=wrap, dtype="bfloat16"))
        own = entries(found.ledgers[4])
        assert own.get("reference copies", (None,))[0] == copies


def test_an_optional_role_has_the_trainers_ranks_or_its_own(model: Path) -> None:
    split = PolicySplit(train=RoleSplit(ranks="2"), infer=RoleSplit(ranks="1"))
    assert list(plan_split(split, 4)) == ["train", "infer"]
    role = ExtraRole("critic", TrainerConfig(), str(model))
    assert role.placement(plan_split(split, 4)).ranks == (0, 1)
    own = replace(split, critic=RoleSplit(ranks="1"))
    assert role.placement(plan_split(own, 4)).ranks == (3,)
    with pytest.raises(PlanError, match=r"'critic' has no ranks: add split.critic, or split.train"):
        role.placement(plan_split({"infer": RoleSplit()}, 4))
    with pytest.raises(PlanError, match=r"split.train.ranks = '' is neither"):
        plan_split(replace(split, train=RoleSplit(ranks="")), 4)


def test_the_ranks_of_each_role_are_printed(model: Path) -> None:
    words = ("split.train.ranks=2", "split.infer.ranks=1", "split.critic.ranks=1")
    roles = {"judge": TrainerConfig(), "frozen": FrozenConfig()}
    found = planned(model, 4, *BF16, *words, **roles)
    said = list(lines(found))
    assert said[:6] == [
        "world of 4",
        "  train    dp 1 x fsdp 2 x tp 1         ranks 0, 1",
        "  infer    1 whole copy                 ranks 2",
        "  critic   dp 1 x fsdp 1 x tp 1         ranks 3",
        "  reference with train                   ranks 0, 1",
        "process groups",
    ]
    assert ("link", (0, 1, 2)) in found.groups
    assert any(line.startswith("memory of critic, most on rank 3") for line in said)


def test_an_engine_leaves_room_for_roles_on_its_ranks(model: Path) -> None:
    def reserved(*words: str, **roles: object) -> int:
        return planned_settings(configured(model, *words, **roles), 2)["infer"]["reserved_bytes"]

    awake = ("offload.sleep=never",)
    more = reserved(*awake, judge=TrainerConfig(), frozen=FrozenConfig()) - reserved(*awake)
    own = PARAMETERS - HEAD + 64
    assert more >= own // 2 * 12 + PARAMETERS // 2 * 2
    assert reserved(judge=TrainerConfig(), frozen=FrozenConfig()) == reserved(), "they sleep"
    everywhere = ("split.critic.ranks=all",)
    assert reserved(*awake, *everywhere, judge=TrainerConfig()) > reserved(*awake)
    assert planned_settings(configured(model, *everywhere), 2) == {}, "nobody says what is there"


def test_links_and_rings_of_roles_on_ranks_of_their_own(model: Path) -> None:
    def communicators(*words: str, **roles: object) -> int:
        return entries(planned(model, 6, *BF16, *words, **roles).ledgers[4])["communicators"][0]

    words = ("split.train.ranks=2", "split.infer.ranks=2", "split.reference.ranks=2")
    critics = ("split.train.ranks=2", "split.infer.ranks=2", "split.critic.ranks=2")
    mib = 1 << 20
    # three placements and the link of the engine; then the link of the reference too
    alone = 170 + (1 + 3 * 4) * 196
    ring = 250 + 24 * 12
    assert communicators(*words) == alone * mib
    assert communicators(*words, frozen=FrozenConfig()) == (alone + ring + 3 * 196) * mib
    assert communicators(*critics, judge=TrainerConfig()) == (alone + ring) * mib
    ordered = TrainerConfig(deterministic=True)
    assert communicators(*critics, judge=ordered) == (alone + ring + 32 * 12) * mib


def test_a_reward_model_is_planned_by_the_head_of_its_folder(model: Path) -> None:
    reward = model / "reward"
    reward.mkdir()
    config = SMALL | {"architectures": ["Qwen3ForSequenceClassification"]}
    (reward / "config.json").write_text(json.dumps(config))

    @dataclass(frozen=True)
    class WithReward(Config):
        def extra_roles(self) -> list[ExtraRole]:
            return [ExtraRole("reward_model", FrozenConfig(dtype="bfloat16"), str(reward))]

    cfg = load(WithReward, None, [f"model={model}", "data=none.jsonl", *BF16])
    found = entries(resolve(cfg, 1).ledgers[0])
    assert found["reward_model weights"][0] == (PARAMETERS - HEAD + 64) * 2


class Judge(Role):
    """A role of a user's own that says what it takes."""

    @classmethod
    def planned_memory(
        cls, cfg: JudgeConfig, placement: Placement, model: str, on_gpu: bool
    ) -> list[TagBytes]:
        return [
            TagBytes("table", cfg.num_bytes // placement.size, "save"),
            TagBytes("scores", 100, "work"),
        ]


class Silent(Role):
    """A role of a user's own that says nothing."""


@dataclass(frozen=True)
class JudgeConfig:
    num_bytes: int = 1 << 30


@dataclass(frozen=True)
class Judged(grpo.Config):
    phases: ClassVar[Phases] = COLOCATED.with_roles(train={"judge": ALL})

    def extra_roles(self) -> list[ExtraRole]:
        return [
            ExtraRole("judge", JudgeConfig(), role=Judge),
            ExtraRole("silent", JudgeConfig(), role=Silent),
        ]


def test_a_role_of_ones_own_counts_if_its_class_says_what_it_takes(model: Path) -> None:
    cfg = load(Judged, None, [f"model={model}", "data=none.jsonl", *BF16])
    found = resolve(cfg, 2)
    own = {tag: entry for tag, entry in entries(found.ledgers[0]).items() if "judge" in tag}
    always = ("sync", "eval", "rollout", "train")
    # it is no Sleeper, so it stays
    assert own == {"judge table": (1 << 29, always), "judge scores": (100, ("train",))}
    assert found.uncounted == ("silent",)
    assert any(line.startswith("not counted  silent") for line in lines(found))
    assert planned_settings(replace(cfg, engine=NativeEngineConfig()), 2) == {}
    with pytest.raises(PlanError, match=r"'judge' has settings of type JudgeConfig: say its class"):
        _ = ExtraRole("judge", JudgeConfig()).role_class
