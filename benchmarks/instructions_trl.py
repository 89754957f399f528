"""TRL's side of instructions_vs_trl.py: GRPOTrainer with the settings of a config of ours.

    python -m benchmarks.instructions_trl ENGINE CURVE LIMIT_S MICRO [--KEY=VALUE ...]

ENGINE generates: "transformers", "batching" (transformers' continuous one) or "vllm". MICRO is the
most samples of a micro-batch.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import spmd_rl as rl
from spmd_rl.config.load import load
from spmd_rl.recipes.grpo import Config
from spmd_rl.rewards.instructions.graders import ifeval
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

EXAMPLE = Path("examples/instructions/gpu.toml")
PACKAGES = ("torch", "transformers", "trl", "accelerate")
BEGAN = time.monotonic()
ON_GPU = torch.cuda.is_available()


def graded(prompt: Prompt, text: str) -> float:
    none, logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
    sample = Sample(prompt.uid, 0, none, logprobs, none, "completed", text=text)
    return ifeval(prompt, sample)["reward"]


class Trainer(GRPOTrainer):
    """Notes what each step draws, and that its prompts are those of our run."""

    def __init__(self, cfg: Config, prompts: list[Prompt], **arguments: Any) -> None:
        self.cfg, self.prompts = cfg, prompts
        self.drawn: dict[str, float] = {}
        super().__init__(reward_funcs=self.reward, **arguments)

    def reward(self, completions: list[Any], number: list[int], **_: Any) -> list[float]:
        rewards = [
            graded(self.prompts[at], answer[0]["content"])
            for at, answer in zip(number, completions, strict=True)
        ]
        self.drawn["reward"] = mean(rewards)
        return rewards

    def _generate_single_turn(self, prompt_ids: list[list[int]], *rest: Any) -> tuple[Any, Any]:
        drawn = super()._generate_single_turn(prompt_ids, *rest)
        self.drawn["tokens"] = sum(map(len, drawn[0]))
        first = self.state.global_step * self.cfg.prompts_per_step
        ours = self.prompts[first : first + self.cfg.prompts_per_step]
        asked = prompt_ids[:: self.cfg.sampling.num_samples]
        if [prompt.tokens.tolist() for prompt in ours] != [list(ids) for ids in asked]:
            raise SystemExit("TRL's prompts have other tokens, or another order, than ours")
        return drawn

    def held_out_reward(self, prompts: list[Prompt]) -> float:
        """Grade samples of prompts, drawn as those of a step."""
        asked = [prompt for prompt in prompts for _ in range(self.cfg.eval.num_samples)]
        ids = [prompt.tokens.tolist() for prompt in asked]
        completions, _ = super()._generate_single_turn(ids, None, {}, 1)
        texts = self.processing_class.batch_decode(completions, skip_special_tokens=True)
        return mean(map(graded, asked, texts))


class Curve(TrainerCallback):
    """Times steps, evaluates between them, and writes all of it to a file after each step."""

    def __init__(self, cfg: Config, held_out: list[Prompt], path: Path, limit_s: float) -> None:
        self.cfg, self.held_out, self.path, self.limit_s = cfg, held_out, path, limit_s
        self.steps: list[dict[str, float]] = []
        self.rewards: dict[int, float] = {}
        self.trainer: Trainer
        self.began = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.evaluate(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append(self.trainer.drawn | {"seconds": now() - self.began})
        if time.monotonic() - BEGAN > self.limit_s:
            control.should_training_stop = True
        ends = control.should_training_stop or state.global_step == self.cfg.steps
        if ends or state.global_step % self.cfg.eval.every == 0:
            self.evaluate(state.global_step)
        self.write()
        self.began = now()

    def evaluate(self, step: int) -> None:
        self.rewards[step] = self.trainer.held_out_reward(self.held_out)
        print(f"after {step} steps: {self.rewards[step]:.3f}", flush=True)
        self.began = now()

    def write(self) -> None:
        versions = {name: version(name) for name in PACKAGES}
        curve = {"steps": self.steps, "held_out": self.rewards, "versions": versions}
        self.path.write_text(json.dumps(curve))


def now() -> float:
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def config(cfg: Config, engine: str, micro: int, folder: str) -> GRPOConfig:
    samples = cfg.prompts_per_step * cfg.sampling.num_samples
    micro = math.gcd(micro, samples)
    return GRPOConfig(
        output_dir=folder,
        seed=cfg.run.seed,
        max_steps=cfg.steps,
        use_cpu=not ON_GPU,
        bf16=ON_GPU,
        gradient_checkpointing=False,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=samples // micro,
        num_generations=cfg.sampling.num_samples,
        max_completion_length=cfg.sampling.max_tokens,
        temperature=cfg.sampling.temperature,
        use_vllm=engine == "vllm",
        use_transformers_continuous_batching=engine == "batching",
        shuffle_dataset=False,  # the rows are in the order of our run
        loss_type="dapo",  # the mean over tokens
        scale_rewards="group",
        num_iterations=1,
        epsilon=0.2,
        beta=cfg.kl.coef,
        use_bias_correction_kl=False,
        learning_rate=cfg.trainer.lr,
        lr_scheduler_type="constant",
        adam_beta1=cfg.trainer.betas[0],
        adam_beta2=cfg.trainer.betas[1],
        adam_epsilon=cfg.trainer.eps,
        weight_decay=cfg.trainer.weight_decay,
        max_grad_norm=cfg.trainer.clip_norm,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    engine, path, limit_s, micro, *words = sys.argv[1:]
    cfg = load(Config, EXAMPLE, words)
    tokenizer = rl.load_tokenizer(cfg.model)
    prompts = rl.Prompts(cfg.data, cfg.prompts, tokenizer).take(cfg.steps * cfg.prompts_per_step)
    curve = Curve(
        cfg, rl.Prompts(cfg.eval.data, cfg.prompts, tokenizer).all(), Path(path), float(limit_s)
    )
    rows = [{"prompt": prompt.chat["messages"], "number": at} for at, prompt in enumerate(prompts)]
    with tempfile.TemporaryDirectory() as folder:
        curve.trainer = trainer = Trainer(
            cfg,
            prompts,
            model=AutoModelForCausalLM.from_pretrained(cfg.model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(cfg.model),
            args=config(cfg, engine, int(micro), folder),
            train_dataset=Dataset.from_list(rows),
            callbacks=[curve],
        )
        trainer.train()


if __name__ == "__main__":
    main()
