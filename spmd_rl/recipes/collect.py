"""Collect: samples of an engine are graded and recorded, and nothing is trained.

spmd-rl run collect --model PATH --data prompts.jsonl --reward module:function

The samples are in the run's folder, from which `spmd-rl run replay` trains.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import spmd_rl as rl
from spmd_rl.environments.config import AgentConfig, agree_with_agent
from spmd_rl.environments.failures import refuse_failures
from spmd_rl.environments.make import check_agent
from spmd_rl.recipes import configs
from spmd_rl.rollout.engine_load import load_metrics


@dataclass(frozen=True)
class Config(configs.DataRecipe):
    model: str  # Hugging Face folder with weights
    # module:function or path/to/file.py:function; several as a table of names and weights;
    # "": samples are not graded
    reward: str | dict[str, float] = "spmd_rl.rewards.answers.match:exact"
    steps: int = 1  # files of samples that are written
    split: configs.InferSplit = field(default_factory=configs.InferSplit)
    agent: AgentConfig = field(default_factory=AgentConfig)

    def __post_init__(self) -> None:
        rl.at_least(self, {"steps": 0, "prompts_per_step": 1})
        agree_with_agent(self)


def check(cfg: Config) -> None:
    """Refuse bad input before anything starts."""
    rl.check_data_recipe(cfg)
    check_agent(cfg.agent)
    rl.check_engine(cfg.engine, cfg.run)


def main(ctl: rl.Controller, cfg: Config) -> None:
    engines = ctl.world.split(cfg.split).infer
    rollout = ctl.spawn(rl.Rollout, cfg.engine, on=engines, **rl.rollout_settings(cfg))
    prompts = rl.load_prompts(cfg)

    for step in ctl.steps(cfg.steps, ctl.resume(prompts=prompts)):
        with ctl.phase("rollout"):
            asked = prompts.take(cfg.prompts_per_step)
            groups = rollout.generate.call(asked, cfg.sampling, step=step.index)
        refuse_failures(groups, cfg.agent)
        step.log(groups, load_metrics(rollout.take_load.call()))
