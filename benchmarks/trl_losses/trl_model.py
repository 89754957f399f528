"""TRL's gradients through a model: one whole step of its trainers, up to the optimizer.

Answers, advantages and the log-probs of old and reference policies are given, so that both sides
learn the same. The rest is the trainer's: the model of transformers, the fused head of TRL,
micro-batches and the scale of the loss. Gradients are left in gradients.safetensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer

from benchmarks.trl_losses.trl_pairs import EXAMPLE, settings
from benchmarks.trl_losses.trl_policy import padded

F32 = torch.float32
Request = dict[str, Any]


class Keep(TrainerCallback):
    """Writes the gradients of the first step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        save_file({name: grad.contiguous() for name, grad in found.items()}, self.path)


class OfTable(GRPOTrainer):
    """Learns from the answers, advantages and earlier log-probs of `table`."""

    table: Request

    def _generate(self, prompts: Any) -> tuple[Any, ...]:
        table = self.table
        completions = table["completions"]
        return table["prompts"], completions, table["tool_mask"], completions, None, {}, None, None

    def _calculate_rewards(self, *_: Any) -> Tensor:
        return torch.zeros(len(self.table["completions"]), 1)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        output["advantages"] = torch.tensor(self.table["advantages"], dtype=F32)
        output["old_per_token_logps"] = padded(self.table["old"], F32)
        if self.beta:
            output["ref_per_token_logps"] = padded(self.table["reference"], F32)
        return output


def one_step(folder: Path) -> dict[str, Any]:
    """Return the settings of a run of one step that leaves gradients as they are."""
    common = {"max_steps": 1, "max_grad_norm": 0.0, "save_strategy": "no", "learning_rate": 0.0}
    return settings(folder) | common | {"logging_steps": 1, "dataloader_pin_memory": False}


def finished(trainer: Any, folder: Path) -> dict[str, Any]:
    trainer.add_callback(Keep(folder / "gradients.safetensors"))
    trainer.train()
    return {"loss": trainer.state.log_history[0]["loss"]}


def model_policy(request: Request, folder: Path) -> dict[str, Any]:
    size, micros = len(request["completions"]), request["micros"]
    config = GRPOConfig(
        **one_step(folder),
        per_device_train_batch_size=size // micros,
        gradient_accumulation_steps=micros,
        num_generations=size,
        num_iterations=2,
        **request["config"],
    )
    trainer = OfTable(
        model=str(folder / "model"),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        reward_funcs=_no_reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "0"}]),
    )
    trainer.table = request
    return finished(trainer, folder)


def _no_reward(**_: Any) -> list[float]:
    raise AssertionError("the rewards are given")


def model_dpo(request: Request, folder: Path) -> dict[str, Any]:
    trainer = DPOTrainer(
        model=str(folder / "model"),
        args=DPOConfig(**_pairs_config(request, folder)),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        train_dataset=Dataset.from_list([EXAMPLE]),
    )
    trainer.precompute_ref_logps = True
    trainer.train_dataset = Dataset.from_list(request["pairs"])
    return finished(trainer, folder)


def model_reward(request: Request, folder: Path) -> dict[str, Any]:
    where = folder / "reward_model"
    trainer = RewardTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(where, dtype=F32),
        args=RewardConfig(**_pairs_config(request, folder)),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        train_dataset=Dataset.from_list(request["pairs"]),
    )
    return finished(trainer, folder)


def _pairs_config(request: Request, folder: Path) -> dict[str, Any]:
    micros = request["micros"]
    return one_step(folder) | {
        "per_device_train_batch_size": len(request["pairs"]) // micros,
        "gradient_accumulation_steps": micros,
        **request["config"],
    }
