"""TRL's policy losses on given log-probs: its own trainers, whose model and engine are a table.

Only what would run a model is replaced: generation, rewards, log-probs and entropies. Advantages,
masks, importance weights, micro-batches and losses are those of the trainers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.trainer.utils import split_tensor_dict

F64 = torch.float64
TRAINERS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}
Request = dict[str, Any]


def padded(rows: list[list[float]], dtype: torch.dtype = F64) -> Tensor:
    """Return rows of different lengths as a matrix that ends in zeros."""
    return pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True)


def of_table(base: type) -> type:
    """Return a trainer that reads its answers, rewards and log-probs from `self.table`."""

    class OfTable(base):
        table: Request
        leaf: Tensor  # log-probs of the policy, by answer
        rows: list[int]  # the answers of the present micro-batch

        def _generate(self, prompts: Any) -> tuple[Any, ...]:
            table = self.table
            ids, completions = table["prompts"], table["completions"]
            if base is RLOOTrainer:
                return ids, completions, completions
            empty: dict[str, Any] = {}
            sampling = table["sampling"] if self.use_vllm else None
            return ids, completions, table["tool_mask"], completions, sampling, empty, None, None

        def _calculate_rewards(self, *_: Any) -> Tensor:
            nan = float("nan")
            rows = [[nan if r is None else r for r in row] for row in self.table["rewards"]]
            return torch.tensor(rows, dtype=F64)

        def _get_per_token_logps_and_entropies(
            self, model: Any, *_: Any, **__: Any
        ) -> tuple[Tensor, Tensor, None]:
            entropies = padded(self.table["entropy"])[self.rows]
            if model is self.ref_model:
                return padded(self.table["reference"]), entropies, None
            if torch.is_grad_enabled():
                return self.leaf[self.rows], entropies, None
            return padded(self.table["old"]), entropies, None

    return OfTable


def build(request: Request, folder: Path) -> Any:
    """Return the trainer of a request. `folder` has a model, of which only the shape matters."""
    base, config_type = TRAINERS[request["trainer"]]
    size, micros = len(request["completions"]), request["micros"]
    config = config_type(
        output_dir=str(folder / "runs"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=size // micros,
        gradient_accumulation_steps=micros,
        num_generations=request["num_generations"] or size,
        num_iterations=2,  # so that the old log-probs are those of the table
        report_to="none",
        disable_tqdm=True,
        **request["config"],
    )
    names = [f"part{index}" for index in range(len(request["rewards"][0]))]
    trainer = of_table(base)(
        model=str(folder / "model"),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        reward_funcs=[_reward(name) for name in names],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "0"}]),
    )
    trainer.use_vllm = request["vllm"]
    trainer.current_gradient_accumulation_steps = micros
    trainer.model.train()
    return trainer


def _reward(name: str) -> Any:
    def never(**_: Any) -> list[float]:
        raise AssertionError("the rewards are given")

    never.__name__ = name
    return never


def policy(request: Request, folder: Path) -> dict[str, Any]:
    """Return the loss over all micro-batches, its gradient by answer, and TRL's advantages."""
    trainer = build(request, folder)
    size, micros = len(request["completions"]), request["micros"]
    trainer.table, trainer.rows = request, list(range(size))
    trainer.leaf = padded(request["logprobs"]).requires_grad_()
    inputs = trainer._generate_and_score_completions([{"prompt": "0"}] * size)
    advantages = inputs["advantages"].tolist()
    if request["advantages"] is not None:
        inputs["advantages"] = torch.tensor(request["advantages"], dtype=F64)
    total = torch.zeros((), dtype=F64)
    chunks = split_tensor_dict(inputs, micros)
    for number, chunk in enumerate(chunks):
        trainer.rows = list(range(number * size // micros, (number + 1) * size // micros))
        total = total + trainer._compute_loss(trainer.model, chunk)
    if request["trainer"] == "rloo":
        total = total / micros  # as transformers does for a loss that is not scaled
    total.backward()
    lengths = map(len, request["logprobs"])
    gradient = [
        row[:length].tolist() for row, length in zip(trainer.leaf.grad, lengths, strict=True)
    ]
    return {"loss": total.item(), "gradient": gradient, "advantages": advantages}
