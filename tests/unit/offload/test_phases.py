"""What a declaration of phases keeps awake."""

from __future__ import annotations

from spmd_rl.offload.phases import ALL, COLOCATED, CONCURRENT, Phases, RoleSleep
from spmd_rl.recipes import distill, grpo, grpo_async, rlhf

MEMORY = [
    ("train", "master"),
    ("train", "moments"),
    ("infer", "weights"),
    ("infer", "kv"),
    ("critic", "moments"),
    ("reference", "weights"),
]


def test_a_trainer_and_an_engine_work_in_turn() -> None:
    awake = {
        phase: {(role, tag) for role, tag in MEMORY if COLOCATED.is_awake(phase, role, tag)}
        for phase in COLOCATED.names
    }
    engine = {("infer", "weights"), ("infer", "kv")}
    assert awake == {
        "sync": {("train", "master"), ("infer", "weights")},
        "eval": engine,
        "rollout": engine,
        "train": {("train", "master"), ("train", "moments")}
        | {("critic", "moments"), ("reference", "weights")},
    }


def test_what_no_phase_names_is_awake() -> None:
    assert COLOCATED.is_awake("rollout", "judge", "weights"), "a role that no phase names"
    assert COLOCATED.is_awake("warm-up", "infer", "kv"), "a phase that is not declared"
    assert CONCURRENT.is_awake("train", "infer", "kv")
    assert CONCURRENT.roles == frozenset()


def test_a_role_that_is_awake_in_every_phase_never_sleeps() -> None:
    phases = Phases({"sync": {"train": ALL, "infer": ("weights",)}, "train": {"train": ALL}})
    assert phases.roles == {"infer"}
    assert not phases.is_awake("train", "infer", "kv")


def test_a_role_is_added_to_phases() -> None:
    phases = COLOCATED.with_roles(train={"teacher": ALL}, grade={"infer": ("weights",)})
    assert phases.is_awake("train", "teacher", "weights")
    assert phases.is_awake("train", "train", "moments"), "the others stay"
    assert not phases.is_awake("rollout", "teacher", "weights")
    assert not phases.is_awake("grade", "train", "master")
    assert not COLOCATED.is_awake("train", "infer", "kv")
    assert "teacher" not in COLOCATED.roles, "the constant itself is as it was"


def test_a_role_knows_the_phases_of_its_tags() -> None:
    sleep = RoleSleep("train", {"sync": ("master",), "rollout": (), "train": ALL})
    assert sleep.phases_with("master") == ["sync", "train"]
    assert sleep.phases_with("moments") == ["train"]


def test_recipes_declare_the_roles_that_they_spawn() -> None:
    assert grpo.Config.phases.roles == {"train", "infer", "reference", "critic"}
    assert distill.Config.phases.is_awake("train", "teacher", "weights")
    for phase, awake in [("rollout", False), ("eval", False), ("grade", True), ("train", True)]:
        assert rlhf.Config.phases.is_awake(phase, "reward_model", "weights") == awake
    assert rlhf.Config.phases.is_awake("grade", "infer", "weights"), "no push comes before rollout"
    assert grpo_async.Config.phases == Phases()
