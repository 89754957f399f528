"""Parameter groups as torch's optimizers take them: each keeps its scale of the learning rate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from spmd_rl.train.optimizer.parameter_groups import UpdateRule

LR_SCALE = "lr_scale"


def torch_groups(
    parameters: Mapping[str, nn.Parameter], rules: Mapping[str, UpdateRule]
) -> list[dict[str, Any]]:
    """Return one group for all parameters that have the same rule, or an empty one."""
    members: dict[UpdateRule, list[nn.Parameter]] = defaultdict(list)
    for name, parameter in parameters.items():
        members[rules[name]].append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": members[rule], LR_SCALE: rule.lr_scale, "weight_decay": rule.weight_decay}
        for rule in members
    ]
    return groups or [{"params": [], LR_SCALE: 1.0}]


def set_rates(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set each group's rate to its scale of `lr`."""
    for group in optimizer.param_groups:
        rate = lr * group[LR_SCALE]
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all memory that an optimizer keeps of its parameters, as plain tensors."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return [plain for value in values if isinstance(value, Tensor) for plain in _plain(value)]


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that a tensor subclass consists of, or the tensor itself."""
    if type(tensor) in (Tensor, nn.Parameter):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for name in names:
        yield from _plain(getattr(tensor, name))
