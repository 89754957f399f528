"""AdamW over shards: torch's own, or torchao's with moments in 8 bits. Both are elementwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from spmd_rl.train.backend import State
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.optimizer.parameter_groups import BLOCK_ELEMENTS, UpdateRule
from spmd_rl.train.optimizer.torch_groups import set_rates, state_tensors, torch_groups
from spmd_rl.train.packages import TORCHAO
from spmd_rl.weights.local_tensors import LocalTensor
from spmd_rl.weights.plan.layout import Box

MOMENTS = ("exp_avg", "exp_avg_sq")

Parameters = dict[str, nn.Parameter]


class _ElementwiseOptimizer:
    """A library's optimizer over a rank's shards, each of which it updates by itself."""

    def __init__(
        self, shards: Mapping[str, LocalTensor], make: Callable[[Parameters], torch.optim.Optimizer]
    ) -> None:
        self._shards = shards
        self._parameters = parameters_of(shards)
        self._optimizer = make(self._parameters)

    def step(self, lr: float) -> None:
        set_rates(self._optimizer, lr)
        self._optimizer.step()

    def on_loaded(self, optimizer_steps: int) -> None:
        for moments in self._optimizer.state.values():
            moments["step"].fill_(optimizer_steps)

    def tensors(self) -> list[Tensor]:
        return state_tensors(self._optimizer)


class ShardedAdamW(_ElementwiseOptimizer):
    """torch.optim.AdamW, with its state allocated, so that a checkpoint is loaded before a step."""

    def __init__(
        self,
        shards: Mapping[str, LocalTensor],
        rules: Mapping[str, UpdateRule],
        cfg: TrainerConfig,
    ) -> None:
        # On a CPU, the fused kernel rounds the last few elements of a shard otherwise.
        is_fused = not cfg.data_parts or any(one.local.is_cuda for one in shards.values())
        options: dict[str, Any] = {"lr": cfg.lr, "betas": cfg.betas, "eps": cfg.eps}
        options["fused"] = is_fused
        super().__init__(
            shards, lambda named: torch.optim.AdamW(torch_groups(named, rules), **options)
        )
        for parameter in self._parameters.values():
            self._optimizer.state[parameter] = _initial_state(parameter)

    def state(self) -> State:
        return {kind: self._moments(kind) for kind in MOMENTS}

    def _moments(self, kind: str) -> list[tuple[str, LocalTensor]]:
        state = self._optimizer.state
        return [
            (name, replace(shard, local=state[self._parameters[name]][kind]))
            for name, shard in self._shards.items()
        ]


class ShardedAdamW8bit(_ElementwiseOptimizer):
    """torchao's AdamW8bit: codes of 8 bits, and a scale for each block of a moment."""

    def __init__(
        self,
        shards: Mapping[str, LocalTensor],
        rules: Mapping[str, UpdateRule],
        cfg: TrainerConfig,
    ) -> None:
        super().__init__(shards, lambda named: _adamw_8bit(torch_groups(named, rules), cfg))
        self._allocate()

    def _allocate(self) -> None:
        """Have the library allocate its state, by a step of rate 0 over gradients of 0."""
        for parameter in self._parameters.values():
            if parameter.numel():
                parameter.grad = torch.zeros_like(parameter)
                self._optimizer.step()
                parameter.grad = None
        self.on_loaded(0)

    def state(self) -> State:
        """Return codes and scales of both moments. The scales of a tensor have one dim."""
        return {
            f"{moment}_{part}": [(name, self._part(name, moment, part)) for name in self._shards]
            for moment in MOMENTS
            for part in ("codes", "scale")
        }

    def _part(self, name: str, moment: str, part: str) -> LocalTensor:
        shard, parameter = self._shards[name], self._parameters[name]
        state = self._optimizer.state[parameter] if parameter.numel() else None
        if part == "codes":
            empty = torch.empty_like(shard.local, dtype=torch.uint8)
            return replace(shard, local=empty if state is None else state[moment].codes)
        shape, box = _scales_of(shard)
        local = shard.local.new_empty(0) if state is None else state[moment].scale
        return LocalTensor(shape, box, local)


def require_torchao() -> None:
    """Raise a ConfigError unless torchao can be imported."""
    try:
        import torchao.optim  # noqa: F401
    except ImportError as error:
        raise TORCHAO.missing(error) from error


def _adamw_8bit(groups: list[dict[str, Any]], cfg: TrainerConfig) -> torch.optim.Optimizer:
    """Return the library's optimizer, at a rate of 0 until a step sets another."""
    require_torchao()
    from torchao.optim import AdamW8bit

    options = {"betas": cfg.betas, "eps": cfg.eps, "block_size": BLOCK_ELEMENTS}
    optimizer: torch.optim.Optimizer = AdamW8bit(groups, lr=0.0, **options)
    return optimizer


def parameters_of(shards: Mapping[str, LocalTensor]) -> dict[str, nn.Parameter]:
    """Return the shards' tensors, which are parameters."""
    return {name: _as_parameter(shard.local) for name, shard in shards.items()}


def _as_parameter(tensor: Tensor) -> nn.Parameter:
    if not isinstance(tensor, nn.Parameter):
        raise TypeError("an optimizer's shard must be a parameter")
    return tensor


def _scales_of(shard: LocalTensor) -> tuple[tuple[int], Box]:
    """Return the global shape of a shard's scales, and this shard's box of them."""
    row = 1
    for size in shard.shape[1:]:
        row *= size
    blocks = [
        elements * row // BLOCK_ELEMENTS for elements in (shard.shape[0], shard.box.offset[0])
    ]
    own = shard.box.num_elements // BLOCK_ELEMENTS
    return (blocks[0],), Box((blocks[1],), (own,))


def _initial_state(shard: nn.Parameter) -> dict[str, Tensor]:
    """Return what AdamW keeps of a parameter, as it is before the first step."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=shard.device),
        "exp_avg": torch.zeros_like(shard, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(shard, requires_grad=False),
    }
