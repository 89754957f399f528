"""Known faults to plant in the engine's path, to see that each is found where it was put.

They are real ones: what a library's own choice, a fused kernel or a rounded table does to a forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_rl.errors import ConfigError
from spmd_rl.kernels import linear_fp32
from spmd_rl.microscope.paths import EnginePath, Step
from spmd_rl.microscope.variants import merged_attention
from spmd_rl.model.network import Attend

NUM_PROCESSORS = 132  # of an H200: how many pieces of work an automatic split wants
SPLIT_BLOCK = 64  # keys; a split has at least so many


def plant(name: str, path: EnginePath) -> None:
    """Raises: ConfigError when there is no fault of that name."""
    if name not in FAULTS:
        raise ConfigError(f"there is no fault '{name}' to plant: choose one of {', '.join(FAULTS)}")
    FAULTS[name](path)


def _middle(path: EnginePath) -> Any:
    layers = path.model.model.layers
    return layers[len(layers) // 2]


def split_k(path: EnginePath) -> None:
    """The middle layer's down projection sums K in two halves."""
    module = _middle(path).mlp.down_proj

    def halves(x: Tensor) -> Tensor:
        half = x.shape[1] // 2
        total = linear_fp32(x[:, :half], module.weight[:, :half]) + linear_fp32(x[:, half:], module.weight[:, half:])
        return (total if module.bias is None else total + module.bias).to(x.dtype)

    module.forward = halves


def library_linear(path: EnginePath) -> None:
    """The middle layer's down projection is the library's, which takes its kernel, and its split of K, by the rows."""
    module = _middle(path).mlp.down_proj
    module.forward = lambda x: F.linear(x, module.weight, module.bias)


def norm_order(path: EnginePath) -> None:
    """The middle layer's norm before the MLP scales by the weight before it rounds, instead of after."""
    norm = _middle(path).post_attention_layernorm

    def scaled_before_rounding(x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        summed = x if residual is None else x + residual
        wide = summed.float()
        scale = wide.square().mean(-1, keepdim=True).add_(norm.eps).rsqrt_() * norm.weight.float()
        return (wide * scale).to(x.dtype), summed

    norm.forward = scaled_before_rounding


def rope_bf16(path: EnginePath) -> None:
    """The tables of cosines and sines are rounded to bfloat16."""
    model = path.model
    cos, sin = model.rope_tables(path.device)
    rounded = cos.bfloat16().float(), sin.bfloat16().float()
    model.rope_tables = lambda device: rounded  # type: ignore[method-assign]


def auto_splits(path: EnginePath) -> None:
    """Decoding cuts a sequence's keys into as many parts as keep the processors busy, and merges their softmaxes."""
    path.wrap = AutoSplits


class AutoSplits:
    """Attention whose decode rows are merged from several ranges of keys, their number chosen from the batch."""

    def __init__(self, step: Step, attend: Attend) -> None:
        self.step = step
        self.attend = attend
        self.busy = NUM_PROCESSORS // (len(step.lengths) * step.cache.num_kv_heads)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = self.attend(layer, q, k, v).clone()
        step, first = self.step, np.cumsum(self.step.lengths) - self.step.lengths
        for i in np.flatnonzero(step.lengths == 1).tolist():
            num_keys, row = int(step.starts[i]) + 1, int(first[i])
            splits = min(self.busy, num_keys // SPLIT_BLOCK)
            if splits > 1:
                keys, values = (self._read(cached, i, num_keys) for cached in step.cache.layers[layer])
                out[row] = merged_attention(q[row], keys, values, splits)
        return out

    def _read(self, cached: Tensor, i: int, num_keys: int) -> Tensor:
        """The keys or values of the step's sequence `i`, [num_keys, K, D]."""
        page, offset = np.divmod(np.arange(num_keys), self.step.cache.page_size)
        slots = torch.from_numpy(self.step.pages[i, page] * self.step.cache.page_size + offset).to(cached.device)
        rows = cached.flatten(0, 1) if self.step.cache.flash else cached.transpose(0, 1)
        return rows.index_select(0, slots)


FAULTS: dict[str, Callable[[EnginePath], None]] = {
    "split-k": split_k,
    "library-linear": library_linear,
    "norm-order": norm_order,
    "rope-bf16": rope_bf16,
    "auto-splits": auto_splits,
}
