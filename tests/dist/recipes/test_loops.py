"""The shipped loops on real gloo ranks: every split, the same tokens, no mismatched bit, and a
resume.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from spmd_rl.observe.metrics_log import read_metrics
from spmd_rl.observe.timeline import read_spans, trace_files, write_chrome
from spmd_rl.report.spans import read_timeline
from tests.dist.recipes.conftest import EXAMPLE

pytestmark = pytest.mark.dist

DISJOINT = ("--split.train.ranks=1", "--split.infer.ranks=1")
EVEN = f"{Path(__file__).parents[2] / 'system/even.py'}:even"
ARITHMETIC = str(Path(__file__).parents[3] / "examples/arithmetic/recipe.py")


def drawn(ended: Any, steps: int) -> list[Any]:
    """Every token and log-prob of every sample, step by step."""
    return [
        [(row["tokens"], row["logprobs"]) for row in ended.samples(step)]
        for step in range(1, steps + 1)
    ]


def check_proof(ended: Any, steps: int) -> None:
    assert ended.code == 0, ended.sentence
    assert len(ended.metrics) == steps
    for row in ended.metrics:
        assert row["onpolicy/mismatched_tokens"] == 0
        assert row["onpolicy/compared_tokens"] > 0


@pytest.mark.parametrize("seed", [0, pytest.param(7, marks=pytest.mark.system)])
def test_split_and_colocated_draw_the_same_tokens(run: Any, seed: int) -> None:
    words = ("--steps=3", f"--run.seed={seed}", f"--trainer.seed={seed}")
    alone = run("grpo", *words, name="alone")
    split = run("grpo", *words, *DISJOINT, nproc=2, name="split")
    fanned = run(
        "grpo", *words, "--split.train.ranks=0-0", "--split.infer.ranks=all", nproc=2, name="fanned"
    )
    for ended in (alone, split, fanned):
        check_proof(ended, 3)
    assert drawn(alone, 3) == drawn(split, 3) == drawn(fanned, 3)
    assert drawn(alone, 3)[0] != drawn(alone, 3)[1]
    for row in alone.metrics:
        assert row["engine/running_max"] == 32
        assert 0 < row["engine/running_mean"] <= 32
        assert row["engine/prefix_hits"] > 0.5, "the samples of a prompt share it"


def test_colocated_on_two_ranks(run: Any) -> None:
    """Warm-up, then GRPO; the exported folder loads in transformers and holds what was trained."""
    ended = run(ARITHMETIC, "--steps=2", "--warmup_steps=5", nproc=2, draws=True)
    check_proof(ended, 2)
    warmup = [row for row in read_metrics(ended.folder / "metrics.jsonl") if row["step"] < 1]
    assert [row["step"] for row in warmup] == [-4, -3, -2, -1, 0]
    assert warmup[0]["warmup/loss"] > warmup[-1]["warmup/loss"] > 0
    assert 0 < sum(row["time/warmup"] for row in warmup) < ended.metrics[0]["before/all"]
    facts = json.loads((ended.folder / "run.json").read_text())
    assert facts["command"].startswith(f"spmd-rl run {ARITHMETIC} ")
    model = AutoModelForCausalLM.from_pretrained(ended.folder / "hf")
    assert facts["parameters"] == sum(p.numel() for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) > 100_000
    assert {path.name for path in ended.folder.iterdir()} >= {
        "config.toml",
        "plan.json",
        "curves.png",
        "checkpoints",
    }
    contracts = json.loads((ended.folder / "contract.json").read_text())
    assert contracts.keys() == {"train", "infer", "train->infer"}
    (followed,) = contracts["train->infer"]
    assert followed["by"] == [
        f"{role} on rank {rank}" for rank in (0, 1) for role in ("train", "infer")
    ]
    assert followed["facts"]["attention"] == "blocked"


def test_every_process_leaves_its_spans(run: Any) -> None:
    """On one time axis: what a rank does in a step lies within the controller's call, and that
    within its step.
    """
    ended = run("grpo", "--steps=3", nproc=2)
    by_process = {
        process.name: [span for _, span in read_spans(path) if span is not None]
        for path, process in trace_files(ended.folder).items()
    }
    assert list(by_process) == ["controller", "rank 0", "rank 1"]
    steps = {span.args["step"]: span for span in by_process["controller"] if span.name == "step"}
    calls = {span.args["call"]: span for span in by_process["controller"] if span.lane == "calls"}
    assert sorted(steps) == [1, 2, 3]
    for rank in ("rank 0", "rank 1"):
        trained = [span for span in by_process[rank] if span.name == "train.train_step"]
        assert [span.args["phase"] for span in trained] == ["train"] * 3
        for span, step in zip(trained, steps.values(), strict=True):
            call = calls[span.args["call"]]
            assert (
                step.start_ns
                < call.start_ns
                < span.start_ns
                < span.end_ns
                < call.end_ns
                < step.end_ns
            )
    assert write_chrome(ended.folder) == sum(map(len, by_process.values()))
    page = read_timeline(ended.folder)
    assert [{lane["process"] for lane in step["lanes"]} for step in page["steps"]] == [
        set(by_process)
    ] * 3


def test_metrics_go_to_the_sinks_too(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And spans nowhere, as they are not asked for."""
    for key, value in {"MODE": "offline", "SILENT": "true", "ERROR_REPORTING": "false"}.items():
        monkeypatch.setenv(f"WANDB_{key}", value)
    ended = run("grpo", "--steps=2", '--run.sinks=["tensorboard", "wandb"]', "--run.trace=false")
    assert ended.code == 0, ended.sentence
    assert not trace_files(ended.folder)
    for name in ("tensorboard/events*", "wandb/offline-run-*/*.wandb"):
        (file,) = ended.folder.glob(name)
        assert b"onpolicy/mismatched_tokens" in file.read_bytes()


def test_poisoned_samples_fail_and_are_counted(run: Any, tmp_path: Path) -> None:
    """One sample of prompt 1, and all of prompt 5: the first group goes on without it, the other is
    left out. All are recorded.
    """
    reward = tmp_path / "poison.py"
    reward.write_text(
        "def grade(prompt, sample):\n"
        "    assert (prompt.uid, sample.index) != (1, 0) and prompt.uid != 5, 'poisoned'\n"
        "    return float((sample.tokens % 2 == 0).mean())\n"
    )
    ended = run("grpo", "--steps=2", f"--reward={reward}:grade", "--hooks.on_error=fail", nproc=2)
    check_proof(ended, 2)
    counted = [(row["reward/failed_samples"], row["reward/failed_groups"]) for row in ended.metrics]
    assert counted == [(5, 1), (0, 0)]
    failed = [(1, 0), *((5, index) for index in range(4))]
    for is_failed in (False, True):
        rows = [row for row in ended.samples(1) if (row["status"] == "failed") == is_failed]
        expected = [(u, i) for u in range(8) for i in range(4) if ((u, i) in failed) == is_failed]
        assert [(row["prompt_uid"], row["index"]) for row in rows] == expected
        assert all("poisoned" in row["metadata"]["error"] for row in rows if is_failed)
    assert ended.sentence.startswith("step 1 goes on without 5 samples: reward grade: raised")
    assert "poisoned" in ended.sentence


def test_four_ranks(run: Any) -> None:
    """Two by two: sharded within fsdp, replicated over dp, an engine on every rank."""
    ended = run("grpo", "--steps=2", "--split.train.dp=2", "--split.train.fsdp=2", nproc=4)
    check_proof(ended, 2)


def test_mixed_split(run: Any) -> None:
    """One trainer rank, three engine ranks, one of them shared."""
    ended = run("grpo", "--steps=2", "--split.train.ranks=0-0", "--split.infer.ranks=0-2", nproc=3)
    check_proof(ended, 2)


def test_one_step_ahead(run: Any) -> None:
    """Samples lag one version from the second step on; the first step's are compared."""
    held_out = f"--eval.data={EXAMPLE / 'eval.jsonl'}@[:9]"
    words = ("--steps=4", held_out, "--eval.every=2", *DISJOINT)
    ended = run("grpo_async", *words, nproc=2, draws=True)
    assert ended.code == 0, ended.sentence
    rows = [row for row in ended.metrics if "time/step" in row]
    assert [row["version/lag_max"] for row in rows] == [0, 1, 1, 1]
    assert rows[0]["onpolicy/compared_tokens"] > 0
    assert sum(row["onpolicy/mismatched_tokens"] for row in rows) == 0
    for evaluated in (0, 2, 4):
        path = ended.folder / f"samples/eval_eval_step_{evaluated:05d}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert {version for row in rows for version in row["versions"]} == {evaluated}


SELDOM = """
from dataclasses import dataclass

import spmd_rl as rl
from spmd_rl.recipes import grpo

@dataclass(frozen=True)
class Config(grpo.Config):
    alias: bool = True

def main(ctl, cfg):
    roles = ctl.world.split(cfg.split)
    trainer = ctl.spawn(rl.Trainer, cfg.trainer, on=roles.train, model=cfg.model)
    settings = {"model": cfg.model, "reward": cfg.reward, "seed": cfg.run.seed}
    rollout = ctl.spawn(rl.Rollout, cfg.engine, on=roles.infer, **settings)
    weights = ctl.link(trainer, rollout, alias=cfg.alias)
    prompts = rl.Prompts(cfg.data, cfg.prompts, rl.load_tokenizer(cfg.model))
    for step in ctl.steps(cfg.steps):
        if step.index % 2 == 0:
            weights.push(version=step.index)
        groups = rollout.generate.call(prompts.take(cfg.prompts_per_step), cfg.sampling)
        batch = rl.pack(groups, rl.group_advantage(groups))
        step.log(groups, trainer.train_step.call(batch, rl.grpo_loss))
"""


@pytest.mark.system
def test_a_recipe_that_pushes_seldom_draws_the_same_tokens_on_every_split(
    run: Any, tmp_path: Path
) -> None:
    """From the weights that were pushed, not from those that an engine in the trainer's memory
    would see.
    """
    (tmp_path / "seldom.py").write_text(SELDOM)
    words = ("seldom.py", "--steps=4", f"--reward={EVEN}", "--trainer.lr=1e-2")
    split = run(*words, *DISJOINT, nproc=2, name="split")
    alone = run(*words, "--alias=false", name="alone")
    for ended in (split, alone):
        assert ended.code == 0, ended.sentence
        assert [row["version/lag_max"] for row in ended.metrics] == [0, 1, 0, 1]
        assert sum(row["onpolicy/mismatched_tokens"] for row in ended.metrics) == 0
    assert drawn(alone, 4) == drawn(split, 4)
    shared = run(*words, name="shared")
    assert shared.code == 1
    assert "push after every train step" in shared.sentence


def test_supervised_loss_falls(run: Any, tmp_path: Path) -> None:
    example = Path(ARITHMETIC).parent
    words = (
        f"--model={example / 'model'}",
        f"--data={example / 'train.jsonl'}",
        "--trainer.init=random",
    )
    ended = run("sft", *words, "--trainer.lr=3e-3", "--steps=30", nproc=2, small=False)
    assert ended.code == 0, ended.sentence
    assert ended.metrics[-1]["train/loss"] < 0.7 * ended.metrics[0]["train/loss"]


def test_same_command_goes_on(run: Any) -> None:
    """Stopped after three steps, then told to do five: the tokens are those of a run that nobody
    stopped.
    """
    words = (f"--reward={EVEN}", "--trainer.lr=1e-2")
    whole = run("grpo", "--steps=5", *words, name="whole")
    first = run("grpo", "--steps=3", *words, name="parts")
    second = run("grpo", "--steps=5", "--run.resume=true", *words, name="parts")
    assert first.code == 0, first.sentence
    for ended in (whole, second):
        check_proof(ended, 5)
    assert min(row["train/grad_norm"] for row in whole.metrics) > 0
    assert [row["step"] for row in second.metrics] == [1, 2, 3, 4, 5]
    assert drawn(second, 5) == drawn(whole, 5)


EARLY = """
from dataclasses import dataclass, field
from pathlib import Path

import spmd_rl as rl

@dataclass(frozen=True)
class Config:
    run: rl.RunConfig = field(default_factory=lambda: rl.RunConfig(save_every=1))

class Slow(rl.Role):
    @rl.collective
    def save(self, folder: str) -> None:
        self.folder = Path(folder)

    @rl.collective
    def wait_until_saved(self) -> None:
        self.folder.mkdir()

    @rl.collective
    def load(self, folder: str) -> None: ...

    @rl.local
    def resume_differences(self) -> list[str]:
        return []

def main(ctl, cfg):
    slow = ctl.spawn(Slow, cfg, on=ctl.world.split({"slow": rl.RoleSplit()}).slow)
    for step in ctl.steps(9, ctl.resume(slow=slow)):
        step.log({"seen": step.index})
        if step.index == 1:
            break
"""


def test_a_recipe_that_stops_early_leaves_its_last_step_whole(run: Any, tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text(EARLY)
    ended = run("early.py", small=False)
    assert ended.code == 0, ended.sentence
    assert [(row["step"], row["seen"]) for row in ended.metrics] == [(1, 0), (2, 1)]
    assert (ended.folder / "checkpoints/step_000002/slow").is_dir()
