"""The training problem of a batch, solved by transformers and torch alone: the oracle of tests."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from spmd_rl.types.batch import Batch

LR, WEIGHT_DECAY, CLIP = 1e-2, 0.1, 1.0
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Reference:
    """What one step on a batch gives: log-probs [T], and by Hugging Face names the gradients before
    they are clipped, and the weights before and after.
    """

    scores: Tensor
    norm: float
    start: Tensors
    gradients: Tensors
    weights: Tensors


def solve(folder: Path, batch: Batch) -> Reference:
    """Take one step of AdamW on the policy gradient of the batch."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).float()
    start = by_name(model, lambda p: p.detach().clone())
    scores = log_probs(model, batch)
    mask = torch.from_numpy(batch.mask)
    slope = torch.from_numpy(batch.advantages * batch.weight) / batch.denominator
    loss = -(scores * slope)[mask].sum()
    loss.backward()
    gradients = by_name(model, lambda p: p.grad.clone())
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=LR).step()
    return Reference(scores.detach(), norm, start, gradients, by_name(model, lambda p: p.detach()))


def log_probs(model: nn.Module, batch: Batch) -> Tensor:
    """The log-prob of each token of the mask, at its temperature, and 0 elsewhere."""
    found, at = [], 0
    for length, temperature in zip(batch.lengths.tolist(), batch.temperature.tolist(), strict=True):
        tokens = torch.from_numpy(batch.tokens[at : at + length].astype(np.int64))
        logits = model(tokens[None]).logits[0, :-1].float() / (temperature or 1.0)
        picked = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        own = torch.from_numpy(batch.mask[at + 1 : at + length])
        found += [torch.zeros(1), torch.where(own, picked, 0.0)]
        at += length
    return torch.cat(found)


def by_name(model: nn.Module, of: object) -> Tensors:
    """Tensors by the names of files: transformers keeps the experts of a layer in two tensors."""
    found: Tensors = {}
    for name, parameter in model.named_parameters():
        tensor = of(parameter)  # type: ignore[operator]
        if match := re.fullmatch(r"(.*\.experts\.)(gate_up_proj|down_proj)", name):
            for expert, one in enumerate(tensor):
                halves = one.chunk(2) if match[2] == "gate_up_proj" else [one]
                names = ["gate_proj", "up_proj"] if len(halves) == 2 else ["down_proj"]
                found |= {
                    f"{match[1]}{expert}.{x}.weight": half
                    for x, half in zip(names, halves, strict=True)
                }
        else:
            found[name] = tensor
    return found
