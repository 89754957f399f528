"""AdamW whose moments lie in host memory, and pass through the GPU at each step.

The kernel is that of torch.optim.AdamW(fused=True). It updates element by element, so the bits are
those of an optimizer whose moments stay on the GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from spmd_rl.train.backend import State
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.optimizer.adamw import MOMENTS
from spmd_rl.train.optimizer.host_stack import Reserve
from spmd_rl.train.optimizer.moment_chunks import CHUNK_ELEMENTS, Chunk, ChunkPart, lay_out
from spmd_rl.train.optimizer.moment_stream import MomentStream
from spmd_rl.train.optimizer.parameter_groups import UpdateRule
from spmd_rl.weights.local_tensors import LocalTensor


class StreamedAdamW:
    """AdamW over a rank's shards, whose moments `reserve` finds room for on the host.

    A shard is a float32 tensor on which somebody sets `grad` before a step.
    """

    def __init__(
        self,
        shards: Mapping[str, LocalTensor],
        rules: Mapping[str, UpdateRule],
        cfg: TrainerConfig,
        reserve: Reserve,
        chunk_elements: int = CHUNK_ELEMENTS,
    ) -> None:
        self._shards, self._rules, self._cfg = shards, rules, cfg
        self._parameters = {name: shard.local for name, shard in shards.items()}
        device = next(iter(self._parameters.values())).device
        sizes = {name: one.numel() for name, one in self._parameters.items()}
        self._layout = lay_out(sizes, chunk_elements)
        self._moments = [
            reserve(self._layout.num_elements * torch.float32.itemsize).view(torch.float32)
            for _ in MOMENTS
        ]
        self._stream = MomentStream(self._moments, device)
        self._all_steps = torch.zeros(len(sizes), device=device)
        self._steps = dict(zip(sizes, self._all_steps.unbind(), strict=True))

    @torch.no_grad()
    def step(self, lr: float) -> None:
        learning = [name for name, one in self._parameters.items() if one.grad is not None]
        if learning:
            torch._foreach_add_([self._steps[name] for name in learning], 1)
        self._stream.run(
            self._layout.chunks, lambda chunk, moments: self._update(chunk, moments, lr)
        )

    def _update(self, chunk: Chunk, moments: Sequence[Tensor], lr: float) -> None:
        """Update the weights of a chunk by its moments on the device, which change too."""
        by_rule: dict[UpdateRule, list[ChunkPart]] = defaultdict(list)
        for part in chunk.parts:
            if self._parameters[part.name].grad is not None:
                by_rule[self._rules[part.name]].append(part)
        for rule, parts in by_rule.items():
            first, second = (
                [one[part.offset : part.offset + part.count] for part in parts] for one in moments
            )
            torch._fused_adamw_(
                [_range(self._parameters[part.name].detach(), part) for part in parts],
                [_range(_gradient(self._parameters[part.name]), part) for part in parts],
                first,
                second,
                [],
                [self._steps[part.name] for part in parts],
                lr=lr * rule.lr_scale,
                beta1=self._cfg.betas[0],
                beta2=self._cfg.betas[1],
                weight_decay=rule.weight_decay,
                eps=self._cfg.eps,
                amsgrad=False,
                maximize=False,
            )

    def state(self) -> State:
        """Return the moments in host memory. Blocks: until the last step has written them."""
        self._stream.wait()
        return {
            kind: [(name, self._moment(flat, name)) for name in self._shards]
            for kind, flat in zip(MOMENTS, self._moments, strict=True)
        }

    def _moment(self, flat: Tensor, name: str) -> LocalTensor:
        shard, start = self._shards[name], self._layout.offsets[name]
        own = flat[start : start + shard.local.numel()].view(shard.local.shape)
        return replace(shard, local=own)

    def on_loaded(self, optimizer_steps: int) -> None:
        self._all_steps.fill_(optimizer_steps)

    def tensors(self) -> list[Tensor]:
        return [self._all_steps]


def _range(tensor: Tensor, part: ChunkPart) -> Tensor:
    return tensor.view(-1)[part.start : part.start + part.count]


def _gradient(parameter: Tensor) -> Tensor:
    """Return the gradient of a parameter that has one, with the parameter's order of elements."""
    assert parameter.grad is not None
    return parameter.grad.contiguous()
