"""All settings that do not go together: `spmd-rl plan --combinations`, docs/combinations.md.

The rows of engines, backends and configs stand beside them. Those of recipes are here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from spmd_rl.algo import refusals as policy
from spmd_rl.algo.make import OF_ALGORITHMS
from spmd_rl.check.inputs import SOURCES_REFUSED
from spmd_rl.config import run
from spmd_rl.config.combinations import ANY, OFF, ON, Combination, compared, other_than
from spmd_rl.data.render import chat
from spmd_rl.environments import config as agents
from spmd_rl.evaluation import schedule
from spmd_rl.model import lora
from spmd_rl.plan import axes
from spmd_rl.rollout import kinds as engines
from spmd_rl.rollout import sampler_config as sampler
from spmd_rl.rollout.native import config as native
from spmd_rl.train import kinds as backends
from spmd_rl.train import refusals as trainer
from spmd_rl.train.extra_role import ROLES_REFUSED

EPOCHS_REFUSED = (
    Combination({"epochs": ON, "steps": ON}, "{0}: expected 0 beside {1}: give one of the two"),
)
START_REFUSED = (
    Combination(
        {
            "start_step": compared("no less than", "steps", lambda start, n: start >= max(n, 1)),
            "steps": ANY,
            "epochs": OFF,
        },
        "{0}: expected less than {1}",
    ),
)
BASE_STAYS = "the reference is the base, which no push replaces"
REFERENCE_REFUSED = (
    Combination(
        {"trainer.lora.rank": ON, "kl.refresh_every": ON},
        "{1}: expected 0 with {0.key}: " + BASE_STAYS,
    ),
    Combination(
        {"trainer.weights": other_than("full"), "kl.refresh_every": ON},
        '{1}: expected 0 with {0.key} = "{0.value}": a push to the reference brings no codes',
    ),
)
REWARD_MODEL_REFUSED = tuple(
    Combination({key: ON}, "{0.key} must be empty: rewards come from reward_model")
    for key in ("reward", "eval.reward")
)


@dataclass(frozen=True)
class Section:
    """Rows about one thing. `table` is the one that has their keys; "": they begin with it."""

    title: str
    rows: tuple[Combination, ...]
    table: str = ""

    def settings(self, row: Combination) -> list[tuple[str, str]]:
        """Return the keys of a row and what they are, each setting that another names left out."""
        prefix = f"{self.table}." if self.table else ""
        return [
            (prefix + key, condition.text)
            for key, condition in row.when.items()
            if condition is not ANY
        ]


def sections() -> list[Section]:
    """Return all rows."""
    return [
        Section("Trainers", trainer.REFUSED, "trainer"),
        Section("Trainers of FSDP2", trainer.REFUSED_IN_FSDP2, "trainer.backend"),
        Section("FSDP2 and the split", backends.FSDP2.refused),
        Section("Megatron-core and the split", backends.MEGATRON.refused),
        Section("Adapters", lora.REFUSED, "trainer.lora"),
        Section("The native engine", native.REFUSED, "engine"),
        Section("The native engine and the run", engines.NATIVE.refused),
        Section("SGLang", engines.SGLANG.refused),
        Section(
            "Models that transformers computes",
            (*trainer.FOREIGN_REFUSED, *engines.PLAIN.refused),
        ),
        Section("Roles on the same ranks", (*axes.ROW_SHARDS_REFUSED, *ROLES_REFUSED)),
        Section("Samplers", sampler.REFUSED, "sampler"),
        Section("On-policy recipes", sampler.ON_POLICY_REFUSED),
        Section("grpo_fully_async", sampler.UNPAUSED_REFUSED),
        Section("Recipes without a sampler", sampler.UNSAMPLED_REFUSED),
        Section("Algorithms", (*OF_ALGORITHMS, *policy.WITHOUT_EFFECT, *policy.REFUSED)),
        Section("Reference models and answers", (*REFERENCE_REFUSED, policy.LONG_BUFFER)),
        Section("Reward models", REWARD_MODEL_REFUSED),
        Section("Agents", (*agents.REFUSED, *agents.RECIPE_REFUSED)),
        Section("Prompts", chat.REFUSED, "prompts"),
        Section("Sources of data", SOURCES_REFUSED),
        Section("Evaluations", schedule.REFUSED, "eval"),
        Section("Runs", run.REFUSED, "run"),
        Section("Steps", (*EPOCHS_REFUSED, *START_REFUSED)),
    ]


def lines(of: Iterable[Section]) -> Iterator[str]:
    """Yield the table as lines of text: settings, and below them what a run says."""
    for section in of:
        yield section.title
        for row in section.rows:
            settings = section.settings(row)
            yield "  " + ", ".join(f"{key} {text}" for key, text in settings)
            yield f"      {row.words_of_any()}"
