"""What sleeps, against memory worked out by hand, and properties of every set of tags."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shapes import config
from spmd_rl.config.load import load
from spmd_rl.controller.endpoint import Role
from spmd_rl.errors import PlanError
from spmd_rl.offload.phases import ALL, COLOCATED, Phases
from spmd_rl.plan.concurrency import RunningSequences, running
from spmd_rl.plan.memory import MemoryModel
from spmd_rl.plan.needs import RunNeeds
from spmd_rl.plan.resolve import RunPlan, resolve
from spmd_rl.plan.sleep import Need, choose_sleep, copied_bytes, effective_phases, sleep_levels
from spmd_rl.plan.start import ranks_per_host, sleep_policy
from spmd_rl.recipes import grpo, grpo_async, sft
from spmd_rl.train.config import FrozenConfig, TrainerConfig
from spmd_rl.train.extra_role import ExtraRole

GIB = 1 << 30
PARAMETERS = 8_190_735_360
WEIGHTS = 2 * PARAMETERS
KV = {"infer": ("kv", "step")}
ENGINE = {"infer": ("weights", "kv", "step")}
TRAINED = {"train": ("moments",)} | ENGINE
EVERYTHING = {"train": ("master", "moments")} | ENGINE


@dataclass(frozen=True)
class WithReference(grpo.Config):
    frozen: FrozenConfig = field(default_factory=FrozenConfig)

    def extra_roles(self) -> list[ExtraRole]:
        return [ExtraRole("reference", self.frozen, self.model)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(config("8B")))
    return folder


def configured(model: Path, *words: str, recipe: Any = grpo.Config) -> Any:
    return load(recipe, None, [f"model={model}", "data=none.jsonl", *words])


def memory_of(model: Path, *words: str, recipe: Any = grpo.Config, world: int = 1) -> MemoryModel:
    found = resolve(configured(model, *words, recipe=recipe), world).memory
    assert found is not None
    return found


def peak(memory: MemoryModel, sleeping: Any, kv_bytes: int = 0) -> int:
    ledgers = memory.ledgers(sleeping).kv_sized(kv_bytes)
    return max(ledger.peak_bytes() for ledger in ledgers.values())


def test_memory_that_is_dropped_sleeps_before_memory_that_is_copied(model: Path) -> None:
    assert sleep_levels(memory_of(model)) == [{}, KV, ENGINE, TRAINED, EVERYTHING]


def test_a_frozen_model_sleeps_before_what_each_step_changes(model: Path) -> None:
    levels = sleep_levels(memory_of(model, recipe=WithReference))
    frozen = {"reference": ("weights",)}
    assert levels == [{}, KV, ENGINE, ENGINE | frozen, TRAINED | frozen, EVERYTHING | frozen]


def test_the_least_costly_set_that_fits_is_chosen(model: Path) -> None:
    memory = memory_of(model, "trainer.backend.recompute=all")
    levels, kv = sleep_levels(memory), 40 * GIB
    peaks = [peak(memory, level, kv) for level in levels]
    assert peaks == sorted(peaks, reverse=True)
    for level, most in zip(levels, peaks, strict=True):
        chosen = choose_sleep(memory, Need(most, kv)).sleeping
        assert peak(memory, chosen, kv) <= most
        if peaks.count(most) == 1 or level == levels[peaks.index(most)]:
            assert chosen == level
        assert choose_sleep(memory, Need(peaks[-1] - 1, kv)).sleeping == EVERYTHING


def test_the_decision_is_a_sentence(model: Path) -> None:
    memory = memory_of(model, "trainer.backend.recompute=all")
    need = Need(126 * GIB, 40 * GIB, RunningSequences(256, 1152))
    chosen = choose_sleep(memory, need)
    assert chosen.sleeping == EVERYTHING
    assert chosen.sentence.startswith(
        "train sleeps (master, moments) and infer sleeps (weights, kv) in turn: all roles awake "
        "need "
    )
    counted = "keys and values of 256 sequences of 1,152 tokens included, and 126.0 GiB may be used"
    assert counted in chosen.sentence
    assert "The largest phase then needs" in chosen.sentence
    fits = choose_sleep(memory, Need(1 << 50, 40 * GIB))
    assert fits.sleeping == {}
    assert fits.sentence.startswith("nothing sleeps: all roles awake need ")


def test_what_sleeps_must_fit_into_host_memory(model: Path) -> None:
    memory, kv = memory_of(model, "trainer.backend.recompute=all"), 200 * GIB
    for level, host_bytes in ((TRAINED, 8 * PARAMETERS), (EVERYTHING, 12 * PARAMETERS)):
        need = Need(peak(memory, level, kv), kv, host_bytes=host_bytes)
        chosen = choose_sleep(memory, need)
        assert (chosen.sleeping, chosen.host_problem) == (level, "")
        assert choose_sleep(memory, replace(need, host_bytes=host_bytes - 1)).host_problem
    few = Need(peak(memory, TRAINED, kv), kv, host_bytes=20 * GIB)
    assert choose_sleep(memory, few).host_problem == (
        "the GPU has room only if train sleeps (moments) and infer sleeps (weights, kv), which "
        "keeps 61.03 GiB in host memory, and a rank may keep 20.00 GiB there: use more ranks, or "
        "give the job more host memory"
    )
    dropped = memory_of(model)
    for most, level in ((1 << 50, {}), (peak(dropped, KV), KV), (peak(dropped, ENGINE), ENGINE)):
        chosen = choose_sleep(dropped, Need(most, host_bytes=0))
        assert (chosen.sleeping, chosen.host_problem) == (level, "")


def test_a_run_whose_host_is_too_small_is_refused(model: Path) -> None:
    words = ("trainer.backend.recompute=all",)
    policy, _ = sleep_policy(configured(model, *words), 1, 140 * GIB, 200 * GIB)
    assert policy.sleeps
    with pytest.raises(PlanError, match="a rank may keep 20.00 GiB there"):
        sleep_policy(configured(model, *words), 1, 140 * GIB, 20 * GIB)
    more = (*words, "offload.host_gib=30")  # a setting goes before what the host has
    with pytest.raises(PlanError, match="a rank may keep 30.00 GiB there"):
        sleep_policy(configured(model, *more), 1, 140 * GIB, 200 * GIB)
    with pytest.raises(PlanError, match="a rank may keep 30.00 GiB there"):
        resolve(configured(model, *more), 1, 140 * GIB).require(1000 * GIB)
    assert sleep_policy(configured(model, *words), 1, 1000 * GIB, 0)[0].sleeps is False


def test_what_a_step_copies(model: Path) -> None:
    """Master weights and moments leave after one phase and return before another. A frozen model is
    saved once.
    """
    memory = memory_of(model, recipe=WithReference)
    assert copied_bytes(memory, ENGINE) == 0
    assert copied_bytes(memory, TRAINED) == 2 * 8 * PARAMETERS
    assert copied_bytes(memory, EVERYTHING) == 2 * 12 * PARAMETERS
    assert copied_bytes(memory, {"reference": ("weights",)}) == WEIGHTS


def test_what_sleeps_leaves_the_phases_that_do_not_need_it(model: Path) -> None:
    memory = memory_of(model)
    (awake,), (asleep,) = (memory.ledgers(one).values() for one in ({}, EVERYTHING))
    saved = {
        phase: awake.resident_bytes(phase) - asleep.resident_bytes(phase) for phase in awake.phases
    }
    step = next(entry.num_bytes for entry in awake.entries if entry.tag == "step")
    assert saved == {
        "sync": 8 * PARAMETERS + step,
        "eval": 12 * PARAMETERS,
        "rollout": 12 * PARAMETERS,
        "train": WEIGHTS + step,
    }
    assert asleep.host_bytes() == 12 * PARAMETERS


def test_roles_on_ranks_of_their_own_do_not_sleep(model: Path) -> None:
    words = ("split.train.ranks=1", "split.infer.ranks=1")
    assert sleep_levels(memory_of(model, *words, world=2)) == [{}]


def test_phases_of_a_run_keep_awake_what_does_not_sleep(model: Path) -> None:
    memory = memory_of(model)
    awake = effective_phases(memory, KV).awake
    assert awake == {
        "sync": {"train": ALL, "infer": ("weights",)},
        "eval": {"train": ALL, "infer": ALL},
        "rollout": {"train": ALL, "infer": ALL},
        "train": {"train": ALL, "infer": ("weights",), "reference": ALL, "critic": ALL},
    }
    assert Phases(awake).roles >= {"infer"}
    assert "train" not in Phases(awake).roles, "it is awake in every phase"
    assert effective_phases(memory, EVERYTHING).awake == COLOCATED.awake
    assert not {"train", "infer"} & effective_phases(memory, {}).roles


levels = st.integers(0, 4)


@given(first=levels, second=levels, world=st.sampled_from([1, 2, 4]))
def test_a_slept_tag_never_raises_a_phase(model: Path, first: int, second: int, world: int) -> None:
    memory = memory_of(model, world=world)
    found = sleep_levels(memory)
    less, more = found[min(first, second)], found[max(first, second)]
    ledgers = memory.ledgers(less), memory.ledgers(more)
    for rank in range(world):
        before, after = ledgers[0][rank], ledgers[1][rank]
        for phase in before.phases:
            assert after.resident_bytes(phase) <= before.resident_bytes(phase)
        assert after.host_bytes() >= before.host_bytes()


@given(
    recompute=st.sampled_from(["none", "cheap", "all"]),
    offload=st.sampled_from(["none", "moments"]),
    tokens=st.sampled_from([1024, 16384]),
)
def test_more_gpus_never_need_more_memory_of_roles_on_each(
    model: Path, recompute: str, offload: str, tokens: int
) -> None:
    """Communicators and buckets aside, of which there are more with more ranks."""
    words = (
        f"trainer.backend.recompute={recompute}",
        f"trainer.backend.offload={offload}",
        f"trainer.max_tokens={tokens}",
        "engine.num_pages=100",
    )
    peaks = []
    for world in (1, 2, 4, 8, 16):
        plan = resolve(configured(model, *words), world)
        peaks.append([_of_roles(plan, phase) for phase in COLOCATED.names])
    for few, many in pairwise(peaks):
        assert all(more <= less for less, more in zip(few, many, strict=True))


def _of_roles(plan: RunPlan, phase: str) -> int:
    return max(
        sum(entry.num_bytes for entry in ledger.counted(phase) if entry.role)
        for ledger in plan.ledgers.values()
    )


def test_what_runs_at_once(model: Path) -> None:
    cfg = configured(
        model, "prompts_per_step=30", "sampling.num_samples=4", "sampling.max_tokens=500"
    )
    plan = resolve(cfg, 4)
    assert plan.spec is not None
    engines = plan.placements.infer
    found = running(RunNeeds.of(cfg), cfg.engine, engines, plan.spec)
    assert found == RunningSequences(8 * 4, 1024 + 500)
    capped = configured(
        model, "engine.max_batch=5", "prompts.max_prompt_tokens=100", "sampling.max_tokens=50000"
    )
    found = running(RunNeeds.of(capped), capped.engine, engines, plan.spec)
    assert found == RunningSequences(5, 40960)


def test_the_policy_of_a_run(model: Path) -> None:
    large, why = sleep_policy(configured(model), 1, 1000 * GIB)
    assert not large.sleeps
    assert why.startswith("nothing sleeps: all roles awake need")
    words = ("trainer.backend.recompute=all", "trainer.backend.offload=moments")
    some, why = sleep_policy(configured(model, *words), 1, 140 * GIB)
    assert some.sleeps
    assert some.phases.roles & {"train", "infer"} == {"infer"}
    assert why.startswith("infer sleeps (kv) in turn: all roles awake need")
    small, _ = sleep_policy(configured(model), 1, 80 * GIB)
    assert small.phases.awake == COLOCATED.awake
    for gpu, policy_words, said in (
        (None, (), "nothing sleeps: on CPUs, memory is not given back"),
        (80 * GIB, ("offload.sleep=never",), "nothing sleeps: offload.sleep = never"),
        (None, ("offload.sleep=always",), "roles sleep in turn: offload.sleep = always"),
    ):
        policy, why = sleep_policy(configured(model, *policy_words), 1, gpu)
        assert why == said
        assert policy.sleeps == said.startswith("roles")
    assert sleep_policy(configured(model, recipe=grpo_async.Config), 1, GIB)[1] == ""
    assert sleep_policy(configured(model, recipe=sft.Config), 1, GIB)[1] == ""


def test_a_run_is_planned_with_the_ranks_of_its_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that share a GPU pass for those of other hosts."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert ranks_per_host() == 8
    variables = {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 8, "LOCAL_WORLD_SIZE": 4}
    for name, value in (variables | {"MASTER_ADDR": "host"}).items():
        monkeypatch.setenv(name, str(value))
    assert ranks_per_host() == 4
    monkeypatch.setenv("SPMD_RL_RANKS_PER_GPU", "2")
    assert ranks_per_host() == 2


def test_a_run_that_cannot_be_planned_sleeps_as_declared(model: Path) -> None:
    broken = configured(model / "nothing")
    policy, why = sleep_policy(broken, 1, 1000 * GIB)
    assert policy.sleeps
    assert policy.phases == COLOCATED
    assert why.startswith("roles sleep in turn: their memory cannot be planned")


class Silent(Role):
    """A role that does not say what it takes."""


@dataclass(frozen=True)
class WithSilent(grpo.Config):
    phases: ClassVar[Phases] = COLOCATED.with_roles(train={"silent": ALL})

    def extra_roles(self) -> list[ExtraRole]:
        return [ExtraRole("silent", TrainerConfig(), role=Silent)]


def test_beside_a_role_that_nobody_counts_all_sleep(model: Path) -> None:
    policy, why = sleep_policy(configured(model, recipe=WithSilent), 1, 1000 * GIB)
    assert policy.phases == WithSilent.phases
    assert why == "roles sleep in turn: the plan does not know what silent takes"
