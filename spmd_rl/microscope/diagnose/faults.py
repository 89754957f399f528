"""Known faults to plant in the engine's pass, to see that each is found where it was planted.

They are real ones: a library's own choice of kernel, a fused kernel, or a rounded table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from spmd_rl.kernels.attention.token_attention import WHOLE, Reach
from spmd_rl.kernels.delta.states import SequenceStates
from spmd_rl.kernels.linear.adapters import add_adapters
from spmd_rl.kernels.moe.router import ExpertRoutes
from spmd_rl.microscope.replay.engine_pass import EnginePass, EngineReplay
from spmd_rl.microscope.replay.split_reference import merge, merged_attention
from spmd_rl.model.attention import latent_size
from spmd_rl.model.fused_projections import FusedProjections
from spmd_rl.model.layers.delta_module import DeltaMixer
from spmd_rl.model.layers.moe_module import MoeMlp
from spmd_rl.model.linear import Linear

NUM_PROCESSORS = 132  # of an H200; an automatic split wants a piece of work for each
SPLIT_BLOCK = 64  # the fewest keys of a split


def plant(name: str, engine_pass: EnginePass) -> None:
    """Plant the fault `name`. Raises: ConfigError if it is unknown, or cannot be planted here."""
    if name not in FAULTS:
        raise ConfigError(f"there is no fault '{name}' to plant: choose one of {', '.join(FAULTS)}")
    FAULTS[name](engine_pass)


def _middle(engine_pass: EnginePass) -> Any:
    layers = engine_pass.model.model.layers
    return layers[len(layers) // 2]


def _last_product(engine_pass: EnginePass) -> Linear:
    """Return the last linear layer of the middle layer that writes to the residual stream."""
    layers, middle = engine_pass.model.spec.blocks, _middle(engine_pass)
    points = [one for one in layers[len(layers) // 2].points() if one.is_added]
    writers = [middle.get_submodule(one.output_of) for one in points]
    return [one for one in writers if isinstance(one, Linear)][-1]


def split_k(engine_pass: EnginePass) -> None:
    """The middle layer's down projection sums K in two halves; in mixtures, that of attention."""
    _replace_product(_last_product(engine_pass), _halves)


def split_k_qkv(engine_pass: EnginePass) -> None:
    """The middle layer's q, k and v, joined in one product as on GPUs, sum K in two halves."""
    _join(engine_pass, _middle(engine_pass).self_attn)


def split_k_gate_up(engine_pass: EnginePass) -> None:
    """The middle layer's gate, up and SiLU, joined in one op as on GPUs, sum K in two halves."""
    _join(engine_pass, _middle(engine_pass).mlp)


def _join(engine_pass: EnginePass, module: Any) -> None:
    """Join the projections with `module`'s in halves, also whenever the engine joins them again."""
    model, join = engine_pass.model, engine_pass.model.fuse_projections

    def joined() -> None:
        join()
        if getattr(module, "joined", None) is None:
            raise ConfigError("this fault needs projections in one product, here they are apart")
        module.joined = InHalves(**vars(module.joined))

    model.fuse_projections = joined  # type: ignore[method-assign]
    model.pack_projections()
    joined()


class InHalves(FusedProjections):
    """A joint product that sums K in two halves."""

    def product(self, x: Tensor) -> Sequence[Tensor]:
        weight = self.weight if self.codes is None else self.codes.decoded(x.dtype)
        whole = _halves(x, weight, self.bias)
        if self.adapters is not None:
            whole, _ = add_adapters(whole, x, *self.adapters, self.widths)
        return whole.split(self.widths, dim=-1)

    def fuses(self, x: Tensor) -> bool:
        return True

    def gated(self, x: Tensor) -> Tensor:
        return silu_mul(*self.product(x))


def _halves(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    half = x.shape[1] // 2
    total = linear_fp32(x[:, :half], weight[:, :half]) + linear_fp32(x[:, half:], weight[:, half:])
    return (total if bias is None else total + bias).to(x.dtype)


def library_linear(engine_pass: EnginePass) -> None:
    """The middle layer's down projection is the library's, whose kernel depends on the rows; in
    mixtures, that of attention.
    """
    _replace_product(_last_product(engine_pass), F.linear)


def _replace_product(module: Linear, product: Callable[..., Tensor]) -> None:
    """Have a layer multiply otherwise, with what its codes stand for and its adapter beside it."""

    def forward(x: Tensor) -> Tensor:
        weight = module.codes.decoded(x.dtype) if module.has_codes else module.weight
        return module.with_adapter(x, product(x, weight, module.bias))

    module.forward = forward  # type: ignore[assignment, method-assign]


def norm_order(engine_pass: EnginePass) -> None:
    """The middle layer's norm before the MLP rounds after scaling by the weight, not before."""
    norm = _middle(engine_pass).post_attention_layernorm

    def scaled_before_rounding(x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        summed = x if residual is None else x + residual
        wide = summed.float()
        scale = wide.square().mean(-1, keepdim=True).add_(norm.eps).rsqrt_() * norm.weight.float()
        return (wide * scale).to(x.dtype), summed

    norm.forward = scaled_before_rounding


def logits_bf16(engine_pass: EnginePass) -> None:
    """The head's logits are rounded to bfloat16, as a plain linear layer gives them."""
    model = engine_pass.model
    multiply = model.logits
    model.logits = lambda hidden: multiply(hidden).bfloat16().float()  # type: ignore[method-assign]


def route_flip(engine_pass: EnginePass) -> None:
    """The middle layer's router leaves out the best expert where expert 0 has a logit above 0."""
    mixture = getattr(_middle(engine_pass), "mlp", None)
    if not isinstance(mixture, MoeMlp) or mixture.takes_all:
        raise ConfigError("route-flip needs a mixture whose tokens leave out some experts")
    choose = mixture._route

    def without_best(logits: Tensor) -> ExpertRoutes:
        best = logits.argmax(1, keepdim=True)
        turned = logits.scatter(1, best, -torch.inf)
        return choose(torch.where(logits[:, :1] > 0, turned, logits))

    mixture._route = without_best  # type: ignore[method-assign]


def state_bf16(engine_pass: EnginePass) -> None:
    """The first layer that hands a state on keeps it in bfloat16 from step to step."""
    mixers = (one for one in engine_pass.model.modules() if isinstance(one, DeltaMixer))
    mixer = next(mixers, None)
    if mixer is None:
        raise ConfigError("state-bf16 needs a model whose layers hand on a state")
    mix = mixer._mixed

    def rounded(qkv: Tensor, b: Tensor, a: Tensor, attend: PagedAttention) -> Tensor:
        mixed = mix(qkv, b, a, attend)
        state = attend.cache.states[mixer.number][1]
        state.copy_(state.bfloat16())
        return mixed

    mixer._mixed = rounded  # type: ignore[method-assign, assignment]


def rope_bf16(engine_pass: EnginePass) -> None:
    """The tables of cosines and sines are rounded to bfloat16."""
    model = engine_pass.model
    cos, sin = model.rope_tables(engine_pass.device)
    rounded = cos.bfloat16().float(), sin.bfloat16().float()
    model.rope_tables = lambda device: rounded  # type: ignore[method-assign]


def auto_splits(engine_pass: EnginePass) -> None:
    """Decoding cuts keys into as many parts as keep the processors busy, and merges softmaxes."""
    if engine_pass.split:
        raise ConfigError(
            f"auto-splits needs attention_split = 0, but here it is {engine_pass.split}"
        )
    if engine_pass.model.exponents is not None:
        raise ConfigError("auto-splits reads keys and values from the cache, which has codes here")
    if latent_size(engine_pass.model.spec) and engine_pass.device.type == "cuda":
        raise ConfigError("auto-splits does not read pages of latents on a GPU")
    engine_pass.wrap_attention = AutoSplits


def library_logprob(engine_pass: EnginePass) -> None:
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

    engine_pass.sampler = draw


class AutoSplits(TokenAttention):
    """Attention that merges decoding rows from ranges of keys; the batch says how many."""

    def __init__(self, replay: EngineReplay, attend: TokenAttention) -> None:
        assert isinstance(attend, PagedAttention)
        self.attend = attend
        self.step = replay.step

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, reach: Reach = WHOLE
    ) -> Tensor:
        out = self.attend(layer, q, k, v, reach=reach)
        if not reach.is_whole:
            return out
        kernel = self.attend.kernel
        if isinstance(kernel, DecodeFlash):
            return self._merge_on_device(layer, q, out, kernel)
        return out if isinstance(kernel, PagedFlash) else self._merge_rows(layer, q, out.clone())

    def history(self, layer: int, *rows: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
        return self.attend.history(layer, *rows)

    def sequences(self, layer: int) -> Iterator[tuple[slice | Tensor, SequenceStates]]:
        return self.attend.sequences(layer)

    def _max_splits(self, batch: int) -> int:
        return NUM_PROCESSORS // (batch * self.attend.cache.kv_heads)

    def _merge_on_device(self, layer: int, q: Tensor, out: Tensor, kernel: DecodeFlash) -> Tensor:
        """Merge all rows on the device, so that it can be recorded."""
        num_keys = kernel.num_keys.long()
        batch = len(num_keys)
        pages = kernel.pages.long()
        keys, values = (cached[pages].flatten(1, 2) for cached in self.attend.cache.keys_of(layer))
        max_splits = max(self._max_splits(batch), 1)
        splits = (num_keys // SPLIT_BLOCK).clamp(1, max_splits)
        outs, log_sums = [], []
        for part in range(max_splits):
            start, length = _part_bounds(part, num_keys, splits)
            k, v = _cut(keys, start), _cut(values, start)
            part_out, log_sum = flash_partial(q[:batch], k, v, length)
            outs.append(part_out)
            log_sums.append(log_sum.masked_fill((part >= splits)[:, None], -torch.inf))
        merged = torch.where((splits > 1)[:, None, None], merge(outs, log_sums), out[:batch])
        return torch.cat([merged, out[batch:]])

    def _merge_rows(self, layer: int, q: Tensor, out: Tensor) -> Tensor:
        step = self.step
        assert step is not None
        last = np.cumsum(step.lengths) - 1
        for request in np.flatnonzero(step.lengths == 1).tolist():
            num_keys = int(step.starts[request]) + 1
            splits = min(self._max_splits(len(last)), num_keys // SPLIT_BLOCK)
            if splits > 1:
                row = int(last[request])
                cached = self._read(layer, step.pages[request], num_keys)
                out[row] = merged_attention(q[row], *cached, splits)
        return out

    def _read(self, layer: int, pages: NDArray[np.int64], num_keys: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values in `pages` of a sequence. Shape: each [num_keys, K, D]."""
        page, offset = np.divmod(np.arange(num_keys), self.attend.cache.page_size)
        slots = torch.from_numpy(pages[page] * self.attend.cache.page_size + offset)
        keys, values = (
            cached.transpose(0, 1).index_select(0, slots.to(cached.device))
            for cached in self.attend.cache.keys_of(layer)
        )
        return keys, values


def _part_bounds(part: int, num_keys: Tensor, splits: Tensor) -> tuple[Tensor, Tensor]:
    """Return start and length of a part of each row's keys. Shape: all [B]."""
    size, num_longer = num_keys // splits, num_keys % splits
    return part * size + num_longer.clamp(max=part), size + (part < num_longer)


def _cut(cached: Tensor, start: Tensor) -> Tensor:
    """Return each row of `cached` from its `start` on. Shape: [B, S, K, D] and [B] -> cached's."""
    columns = start[:, None] + torch.arange(cached.shape[1], device=cached.device)
    columns = columns.clamp(max=cached.shape[1] - 1)
    return torch.take_along_dim(cached, columns[..., None, None], 1)


FAULTS: dict[str, Callable[[EnginePass], None]] = {
    "split-k": split_k,
    "split-k-qkv": split_k_qkv,
    "split-k-gate-up": split_k_gate_up,
    "library-linear": library_linear,
    "norm-order": norm_order,
    "rope-bf16": rope_bf16,
    "route-flip": route_flip,
    "state-bf16": state_bf16,
    "logits-bf16": logits_bf16,
    "auto-splits": auto_splits,
    "library-logprob": library_logprob,
}
