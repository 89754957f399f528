"""TRL's losses over pairs and over a teacher's distribution, on given numbers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.distillation_trainer import _chunked_divergence_loss
from trl.trainer.dpo_trainer import DataCollatorForPreference

F64 = torch.float64
PAD = 0
EXAMPLE = {"prompt": "1", "chosen": "2", "rejected": "3"}
Request = dict[str, Any]


def settings(folder: Path) -> dict[str, Any]:
    """Return the settings of every trainer of pairs."""
    return {
        "output_dir": str(folder / "runs"),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
    }


def dpo_trainer(request: Request, folder: Path) -> DPOTrainer:
    trainer = DPOTrainer(
        model=str(folder / "model"),
        args=DPOConfig(**settings(folder), **request["config"]),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        train_dataset=Dataset.from_list([EXAMPLE]),
    )
    trainer.precompute_ref_logps = True  # the reference's log-probs are columns of the pairs
    return trainer


def split(values: list[Any], parts: int) -> list[list[Any]]:
    size = len(values) // parts
    return [values[start : start + size] for start in range(0, len(values), size)]


def dpo(request: Request, folder: Path) -> dict[str, Any]:
    """Return the mean of the micro-batches' losses, and its gradient by token of an answer."""
    trainer = dpo_trainer(request, folder)
    collate = DataCollatorForPreference(pad_token_id=PAD)
    leaves = {
        name: [torch.tensor(pair[name], dtype=F64, requires_grad=True) for pair in request["pairs"]]
        for name in ("chosen", "rejected")
    }
    total = torch.zeros((), dtype=F64)
    numbers = list(range(len(request["pairs"])))
    for part in split(numbers, request["micros"]):
        inputs = collate.torch_call([request["pairs"][number]["tokens"] for number in part])
        rows = [leaves["chosen"][n] for n in part] + [leaves["rejected"][n] for n in part]
        mask = inputs["completion_mask"][:, 1:].bool()
        logprobs = torch.zeros(mask.shape, dtype=F64).masked_scatter(mask, torch.cat(rows))
        total = total + trainer._compute_loss(_model_of(logprobs), inputs, return_outputs=False)
    (total / request["micros"]).backward()
    gradient = [
        (leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)).tolist()
        for pair in zip(leaves["chosen"], leaves["rejected"], strict=True)
        for leaf in pair
    ]
    return {"loss": total.item() / request["micros"], "gradient": gradient}


def _model_of(logprobs: Tensor) -> Any:
    """Return a model whose fused head gives these log-probs."""
    zeros = torch.zeros_like(logprobs)

    def model(**_: Any) -> SimpleNamespace:
        return SimpleNamespace(
            log_probs=logprobs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
        )

    return model


def reward(request: Request, folder: Path) -> dict[str, Any]:
    """Return the mean of the micro-batches' losses, and its gradient by answer's reward."""
    trainer = RewardTrainer(
        model=str(folder / "model"),
        args=RewardConfig(**settings(folder), **request["config"]),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        train_dataset=Dataset.from_list([EXAMPLE]),
    )
    rewards = torch.tensor(request["rewards"], dtype=F64, requires_grad=True)  # [pairs, 2]
    total = torch.zeros((), dtype=F64)
    for part in split(list(range(len(rewards))), request["micros"]):
        logits = rewards[part].T.reshape(-1, 1)
        inputs = {"attention_mask": torch.ones(len(logits), 1)}
        if request["margin"]:
            inputs["margin"] = torch.full((len(part),), request["margin"], dtype=F64)
        total = total + trainer.compute_loss(_scores(logits), inputs)
    (total / request["micros"]).backward()
    return {"loss": total.item() / request["micros"], "gradient": rewards.grad.flatten().tolist()}


def _scores(logits: Tensor) -> Any:
    def model(**_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=logits)

    return model


def divergence(request: Request, folder: Path) -> dict[str, Any]:
    """Return the divergence of a student from a teacher, and its gradient by logit.

    The hidden states are the logits, and the head is the identity. TRL computes in float32.
    """
    student = torch.tensor(request["student"], dtype=torch.float32, requires_grad=True)
    teacher = torch.tensor(request["teacher"], dtype=torch.float32)
    identity = torch.eye(student.shape[1], dtype=torch.float32)
    mask = torch.ones(1, len(student))
    loss, _, _ = _chunked_divergence_loss(
        student[None], teacher[None], identity, identity, mask, request["beta"]
    )
    loss.backward()
    return {"loss": loss.item(), "gradient": student.grad.flatten().tolist()}


def overlong(request: Request, folder: Path) -> dict[str, Any]:
    """Return the penalty on answers of some lengths."""
    penalty = get_soft_overlong_punishment(request["max_tokens"], request["buffer"])
    return {"penalties": penalty([[0] * length for length in request["lengths"]])}
