"""TRL's side: GRPOTrainer on the same work. What only costs time is off: saving, printing,
recomputation.

python -m benchmarks.grpo_step.trl_side MODEL DATA
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.grpo_step.work import (
    BETAS,
    CLIP_NORM,
    EPSILON,
    GROUP,
    LEARNING_RATE,
    NEW_TOKENS,
    PROMPTS,
    given_completions,
    num_digits,
)
from benchmarks.peer import Laps


class Counted(GRPOTrainer):
    """Takes the first step on the given completions, and notes how many tokens each step makes and
    learns from.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.facts: dict[str, float] = {}

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], *rest: Any, **named: Any
    ) -> tuple[Any, Any]:
        if self.state.global_step == 0:
            completions: Any = [tokens for group in given_completions() for tokens in group]
            logprobs = None
        else:
            completions, logprobs = super()._generate_single_turn(prompt_ids, *rest, **named)
        self.facts["generated_tokens"] = sum(map(len, completions))
        self.facts["prompt_tokens"] = sum(map(len, prompt_ids[::GROUP]))
        return completions, logprobs

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        self.facts["gradient_tokens"] = int(inputs["completion_mask"].sum())
        return super()._compute_loss(model, inputs)


class Turns(TrainerCallback):
    def __init__(self, laps: Laps) -> None:
        self.laps = laps
        self.trainer: Counted

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.laps.lap(**self.trainer.facts)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        self.trainer.facts |= {
            name: logs[name] for name in ("loss", "grad_norm", "entropy") if name in logs
        }


def reward(completions: list[str], **_: Any) -> list[float]:
    return [num_digits(text) for text in completions]


def config(folder: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP,
        max_completion_length=NEW_TOKENS,
        generation_kwargs={"min_new_tokens": NEW_TOKENS},
        shuffle_dataset=False,
        beta=0.0,
        loss_type="dapo",  # the mean over tokens
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPSILON,
        weight_decay=0.0,
        max_grad_norm=CLIP_NORM,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def main() -> None:
    folder, data = sys.argv[1:]
    rows = [{"prompt": json.loads(line)["prompt"]} for line in Path(data).read_text().splitlines()]
    turns = Turns(Laps())
    with tempfile.TemporaryDirectory() as output:
        trainer = Counted(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(folder),
            reward_funcs=reward,
            args=config(output),
            train_dataset=Dataset.from_list(rows),
            callbacks=[turns],
        )
        trainer.remove_callback(PrinterCallback)
        turns.trainer = trainer
        trainer.train()


if __name__ == "__main__":
    main()
