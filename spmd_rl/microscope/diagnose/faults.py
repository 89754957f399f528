"""Known faults to plant in the engine's path, to see that each is found where it was put.

They are real ones: what a library's own choice, a fused kernel or a rounded table does to a forward
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.errors import ConfigError
from spmd_rl.kernels import PagedAttention, TokenAttention, linear_fp32, sample_and_score, silu_mul
from spmd_rl.kernels.attention.flash import DecodeFlash, PagedFlash
from spmd_rl.kernels.attention.flash_partial import flash_partial
from spmd_rl.microscope.replay.engine_pass import EnginePass, Replaying
from spmd_rl.microscope.replay.split_reference import merge, merged_attention
from spmd_rl.model.fused_projections import FusedProjections

NUM_PROCESSORS = 132  # of an H200: how many pieces of work an automatic split wants
SPLIT_BLOCK = 64  # keys; a split has at least so many


def plant(name: str, path: EnginePass) -> None:
    """Raises: ConfigError when there is no fault of that name, or it cannot be planted there."""
    if name not in FAULTS:
        raise ConfigError(f"there is no fault '{name}' to plant: choose one of {', '.join(FAULTS)}")
    FAULTS[name](path)


def _middle(path: EnginePass) -> Any:
    layers = path.model.model.layers
    return layers[len(layers) // 2]


def split_k(path: EnginePass) -> None:
    """The middle layer's down projection sums K in two halves."""
    module = _middle(path).mlp.down_proj
    module.forward = lambda x: _halves(x, module.weight, module.bias)


def split_k_qkv(path: EnginePass) -> None:
    """The engine's projections are joined, as on GPUs, and the middle layer's q, k and v sum K in
    two halves.
    """
    _join(path, _middle(path).self_attn)


def split_k_gate_up(path: EnginePass) -> None:
    """The engine's projections are joined, as on GPUs; the middle layer's gate, up and SiLU are one
    op, K in halves.
    """
    _join(path, _middle(path).mlp)


def _join(path: EnginePass, module: Any) -> None:
    """Also whenever the engine joins them again."""
    model, join = path.model, path.model.fuse_projections

    def joined() -> None:
        join()
        module.joined = InHalves(**vars(module.joined))

    model.fuse_projections = joined  # type: ignore[method-assign]
    model.pack_projections()
    joined()


class InHalves(FusedProjections):
    """A joint product with two chains over K."""

    def product(self, x: Tensor) -> Sequence[Tensor]:
        return _halves(x, self.weight, self.bias).split(self.widths, dim=-1)

    def fuses(self, x: Tensor) -> bool:
        return True

    def gated(self, x: Tensor) -> Tensor:
        return silu_mul(*self.product(x))


def _halves(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    half = x.shape[1] // 2
    total = linear_fp32(x[:, :half], weight[:, :half]) + linear_fp32(x[:, half:], weight[:, half:])
    return (total if bias is None else total + bias).to(x.dtype)


def library_linear(path: EnginePass) -> None:
    """The middle layer's down projection is the library's, which takes its kernel, and its split of
    K, by the rows.
    """
    module = _middle(path).mlp.down_proj
    module.forward = lambda x: F.linear(x, module.weight, module.bias)


def norm_order(path: EnginePass) -> None:
    """The middle layer's norm before the MLP scales by the weight before it rounds, instead of
    after.
    """
    norm = _middle(path).post_attention_layernorm

    def scaled_before_rounding(x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        summed = x if residual is None else x + residual
        wide = summed.float()
        scale = wide.square().mean(-1, keepdim=True).add_(norm.eps).rsqrt_() * norm.weight.float()
        return (wide * scale).to(x.dtype), summed

    norm.forward = scaled_before_rounding


def logits_bf16(path: EnginePass) -> None:
    """The head's logits are rounded to bfloat16, as a plain linear layer gives them."""
    model = path.model
    multiply = model.logits
    model.logits = lambda hidden: multiply(hidden).bfloat16().float()  # type: ignore[method-assign]


def rope_bf16(path: EnginePass) -> None:
    """The tables of cosines and sines are rounded to bfloat16."""
    model = path.model
    cos, sin = model.rope_tables(path.device)
    rounded = cos.bfloat16().float(), sin.bfloat16().float()
    model.rope_tables = lambda device: rounded  # type: ignore[method-assign]


def auto_splits(path: EnginePass) -> None:
    """Decoding cuts a sequence's keys into as many parts as keep the processors busy, and merges
    their softmaxes.
    """
    if path.split:
        raise ConfigError(
            f"auto-splits is planted where keys are not cut, but attention_split is {path.split} here"
        )
    path.wrap = AutoSplits


def library_logprob(path: EnginePass) -> None:
    """The engine scores what it draws with the library's log-softmax."""

    def draw(
        logits: Tensor,
        inv_temperature: Tensor,
        *rest: Any,
        given: Tensor | None = None,
        **filters: Any,
    ) -> tuple[Tensor, Tensor]:
        tokens = (
            sample_and_score(logits, inv_temperature, *rest, **filters)[0]
            if given is None
            else given
        )
        return tokens, (logits * inv_temperature[:, None]).log_softmax(-1).gather(
            1, tokens[:, None]
        )[:, 0]

    path.sampler = draw


class AutoSplits(TokenAttention):
    """Attention whose decode rows are merged from several ranges of keys, their number chosen from
    the batch.
    """

    def __init__(self, replaying: Replaying, attend: TokenAttention) -> None:
        assert isinstance(attend, PagedAttention)
        self.attend = attend
        self.step = replaying.step

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = self.attend(layer, q, k, v)
        kernel = self.attend.kernel
        if isinstance(kernel, DecodeFlash):
            return self._at_once(layer, q, out, kernel)
        return out if isinstance(kernel, PagedFlash) else self._row_by_row(layer, q, out.clone())

    def _busy(self, batch: int) -> int:
        return NUM_PROCESSORS // (batch * self.attend.cache.num_kv_heads)

    def _at_once(self, layer: int, q: Tensor, out: Tensor, kernel: DecodeFlash) -> Tensor:
        """All on the device, so that it can be recorded."""
        pages, num_keys = kernel.pages, kernel.num_keys.long()
        batch = len(num_keys)
        keys, values = (one[pages.long()].flatten(1, 2) for one in self.attend.cache.layers[layer])
        splits = (num_keys // SPLIT_BLOCK).clamp(1, max(self._busy(batch), 1))
        size, longer = num_keys // splits, num_keys % splits
        parts, log_sums = [], []
        for part in range(max(self._busy(batch), 1)):
            start, length = part * size + longer.clamp(max=part), size + (part < longer)
            columns = (start[:, None] + torch.arange(keys.shape[1], device=q.device)).clamp(
                max=keys.shape[1] - 1
            )
            k, v = (
                torch.take_along_dim(one, columns[..., None, None], 1) for one in (keys, values)
            )
            mine, log_sum = flash_partial(q[:batch], k, v, length)
            parts.append(mine)
            log_sums.append(log_sum.masked_fill((part >= splits)[:, None], -torch.inf))
        merged = torch.where((splits > 1)[:, None, None], merge(parts, log_sums), out[:batch])
        return torch.cat([merged, out[batch:]])

    def _row_by_row(self, layer: int, q: Tensor, out: Tensor) -> Tensor:
        assert self.step is not None
        first = np.cumsum(self.step.lengths) - self.step.lengths
        for request in np.flatnonzero(self.step.lengths == 1).tolist():
            num_keys, row = int(self.step.starts[request]) + 1, int(first[request])
            splits = min(self._busy(len(first)), num_keys // SPLIT_BLOCK)
            if splits > 1:
                pages = self.step.pages[request]
                keys, values = (
                    self._read(cached, pages, num_keys)
                    for cached in self.attend.cache.layers[layer]
                )
                out[row] = merged_attention(q[row], keys, values, splits)
        return out

    def _read(self, cached: Tensor, pages: NDArray[np.int64], num_keys: int) -> Tensor:
        """Return the keys or values in `pages` of a sequence. Shape: [num_keys, K, D]."""
        page, offset = np.divmod(np.arange(num_keys), self.attend.cache.page_size)
        slots = torch.from_numpy(pages[page] * self.attend.cache.page_size + offset)
        return cached.transpose(0, 1).index_select(0, slots.to(cached.device))


FAULTS: dict[str, Callable[[EnginePass], None]] = {
    "split-k": split_k,
    "split-k-qkv": split_k_qkv,
    "split-k-gate-up": split_k_gate_up,
    "library-linear": library_linear,
    "norm-order": norm_order,
    "rope-bf16": rope_bf16,
    "logits-bf16": logits_bf16,
    "auto-splits": auto_splits,
    "library-logprob": library_logprob,
}
