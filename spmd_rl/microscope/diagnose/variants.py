"""Known ways of computing an op: the contract's, the libraries', and those of the faults that are
met most.

Each is a function of the op's inputs for rows that were computed together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_rl.kernels import (
    PackedAttention,
    linear,
    linear_fp32,
    pad_rows,
    rms_norm,
    rope,
    rope_table,
    silu_mul,
    token_logprobs,
)
from spmd_rl.microscope.replay.split_reference import merged_attention
from spmd_rl.microscope.taps.points import LINEARS
from spmd_rl.model.rope_frequencies import inverse_frequencies
from spmd_rl.model.spec import ModelSpec

MAX_RANGES = 8


@dataclass(frozen=True)
class Together:
    """Rows of one step, or for attention of one sequence from its start.

    Shape: `x` the op's inputs [R, ...] each; all else [R]: `positions`, each row's next token and
    its temperature, and which rows matter. `split`: of the keys, or 0. `source` [R, C] and
    `projections`: what makes `x`, for an op that does so itself.
    """

    x: tuple[Tensor, ...]
    module: Any
    spec: ModelSpec
    positions: Tensor
    targets: Tensor
    temperatures: Tensor
    wanted: Tensor
    split: int = 0
    source: Tensor | None = None
    projections: tuple[Any, ...] = ()


Compute = Callable[[Together], Tensor]
Variant = tuple[str, Compute]


def variants(op: str) -> list[Variant]:
    if op in LINEARS:
        exact = ("the contract's product", partial(_product, _head if op == "logits" else linear))
        parts = [(f"K summed in {n} parts", partial(_in_parts, n)) for n in (2, 3, 4, 8)]
        library = ("the library's product of that many rows", partial(_product, F.linear))
        padded = ("the library's product, rows padded", partial(_product, _padded))
        rounded = [
            ("the contract's product, rounded to bfloat16", partial(_product, _rounded_head))
        ]
        return [exact, *(rounded if op == "logits" else []), library, padded, *parts]
    return _OTHERS.get(op, [])


def variants_from_source(op: str) -> list[Variant]:
    """Of an op that begins with its own projections: each way of these products with each way of
    what follows.
    """
    ways = variants(op)
    return [
        (f"{product}, then {says}", partial(_after_products, multiply, compute))
        for product, multiply in variants("q_proj")
        for says, compute in ways
    ]


def _after_products(multiply: Compute, compute: Compute, given: Together) -> Tensor:
    assert given.source is not None
    alone = replace(given, x=(given.source,))
    return compute(
        replace(given, x=tuple(multiply(replace(alone, module=one)) for one in given.projections))
    )


def _product(product: Callable[..., Tensor], given: Together) -> Tensor:
    return product(given.x[0], given.module.weight, getattr(given.module, "bias", None))


def _head(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear_fp32(x, weight)


def _rounded_head(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear_fp32(x, weight).bfloat16()


def _padded(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(pad_rows(x), weight, bias)[: len(x)]


def _in_parts(count: int, given: Together) -> Tensor:
    x, weight = given.x[0], given.module.weight
    parts = zip(x.tensor_split(count, 1), weight.tensor_split(count, 1), strict=True)
    total = torch.stack([linear_fp32(part, columns) for part, columns in parts]).sum(0)
    bias = getattr(given.module, "bias", None)
    return (total if bias is None else total + bias).to(x.dtype)


def _normed(given: Together) -> Tensor:
    return rms_norm(given.x[0], given.module.weight, given.spec.rms_eps)


def _library_normed(given: Together) -> Tensor:
    return _library_norm(given.x[0], given)


def _scaled_before_rounding(given: Together) -> Tensor:
    x = given.x[0]
    return (x.float() * (_inverse_root(x, given) * given.module.weight.float())).to(x.dtype)


def _library_norm(x: Tensor, given: Together) -> Tensor:
    return given.module.weight * (x.float() * _inverse_root(x, given)).to(x.dtype)


def _inverse_root(x: Tensor, given: Together) -> Tensor:
    return torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + given.spec.rms_eps)


def _rotated(given: Together) -> Tensor:
    return rope(_before_rope(given), *_tables(given))


def _rotated_by_rounded_tables(given: Together) -> Tensor:
    cos, sin = (table.bfloat16().float() for table in _tables(given))
    return rope(_before_rope(given), cos, sin)


def _before_rope(given: Together) -> Tensor:
    """The projection by heads, normed where the model norms them."""
    x = _heads(given.x[0], given.spec)
    return x if given.module is None else rms_norm(x, given.module.weight, given.spec.rms_eps)


def _library_rotated(given: Together) -> Tensor:
    x = _heads(given.x[0], given.spec)
    x = x if given.module is None else _library_norm(x, given)
    angles = given.positions.float()[:, None] * inverse_frequencies(given.spec).to(x.device)
    # on the device
    tables = (table * given.spec.rope.attention_factor for table in (angles.cos(), angles.sin()))
    cos, sin = (torch.cat([table, table], -1).to(x.dtype).unsqueeze(1) for table in tables)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _tables(given: Together) -> tuple[Tensor, Tensor]:
    spec = given.spec
    cos, sin = rope_table(inverse_frequencies(spec), spec.max_positions, spec.rope.attention_factor)
    return cos.to(given.positions.device)[given.positions], sin.to(given.positions.device)[
        given.positions
    ]


def _heads(x: Tensor, spec: ModelSpec) -> Tensor:
    return x.unflatten(1, (-1, spec.head_dim))


def _attended(given: Together, split: int = 0) -> Tensor:
    spec, (q, k, v) = given.spec, (_heads(x, given.spec) for x in given.x)
    lengths, heads = np.array([len(q)], np.int32), (spec.num_heads, spec.num_kv_heads)
    attend = PackedAttention(
        lengths, num_heads=heads[0], num_kv_heads=heads[1], device=q.device, split=split
    )
    q, k, v = pad_rows(q), pad_rows(k), pad_rows(v)
    return attend(0, q, k, v)[: len(given.positions)]


def _library_attended(given: Together) -> Tensor:
    q, k, v = (_heads(x, given.spec).transpose(0, 1).unsqueeze(0) for x in given.x)
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out[0].transpose(0, 1)


def _merged(ranges: int, given: Together) -> Tensor:
    """Only the wanted rows; the others stay zero."""
    q, k, v = (_heads(x, given.spec) for x in given.x)
    out = torch.zeros_like(q)
    for row in given.wanted.nonzero()[:, 0].tolist():
        if row + 1 >= ranges:
            out[row] = merged_attention(q[row], k[: row + 1], v[: row + 1], ranges)
    return out


def _scored(given: Together) -> Tensor:
    return token_logprobs(given.x[0].float(), given.targets, _inverse(given))[0].unsqueeze(1)


def _library_scored(given: Together) -> Tensor:
    return _chosen((given.x[0].float() * _inverse(given)[:, None]).log_softmax(-1), given)


def _scored_by_division(given: Together) -> Tensor:
    return _chosen((given.x[0].float() / given.temperatures[:, None]).log_softmax(-1), given)


def _scored_by_log_sum(given: Together) -> Tensor:
    z = given.x[0].float() * _inverse(given)[:, None]
    return _chosen(z, given) - z.logsumexp(-1, keepdim=True)


def _scored_by_log_of_softmax(given: Together) -> Tensor:
    return _chosen((given.x[0].float() * _inverse(given)[:, None]).softmax(-1), given).log()


def _scored_of_rounded(given: Together) -> Tensor:
    return _chosen(
        (given.x[0].bfloat16().float() * _inverse(given)[:, None]).log_softmax(-1), given
    )


def _scored_in_the_activations_format(given: Together) -> Tensor:
    return _chosen(
        (given.x[0].bfloat16() * _inverse(given)[:, None].bfloat16()).log_softmax(-1), given
    )


def _scored_untempered(given: Together) -> Tensor:
    return _chosen(given.x[0].float().log_softmax(-1), given)


def _inverse(given: Together) -> Tensor:
    return 1 / given.temperatures  # rounded to float32, as engine and trainer do it


def _chosen(x: Tensor, given: Together) -> Tensor:
    return x.gather(1, given.targets[:, None])


_LOGPROB: list[Variant] = [
    ("exponentials summed by shards of the vocabulary, the contract's", _scored),
    ("the library's log-softmax, then one entry", _library_scored),
    ("the library's log-softmax of logits divided by the temperature", _scored_by_division),
    ("logit less the library's log-sum of exponentials", _scored_by_log_sum),
    ("the logarithm of the library's softmax", _scored_by_log_of_softmax),
    ("the library's log-softmax of logits rounded to bfloat16", _scored_of_rounded),
    ("the library's log-softmax in bfloat16", _scored_in_the_activations_format),
    ("the log-prob at temperature 1", _scored_untempered),
]
_NORM: list[Variant] = [
    ("the contract's norm", _normed),
    ("torch's own mean, scaled by the weight after rounding", _library_normed),
    ("scaled by the weight before rounding", _scaled_before_rounding),
]
_ROPE: list[Variant] = [
    ("turned in float32 with one rounding, the contract's", _rotated),
    ("tables rounded to bfloat16", _rotated_by_rounded_tables),
    (
        "torch's own norm, turned in the activations' format with a rounding at every step",
        _library_rotated,
    ),
]
_ATTENTION: list[Variant] = [
    ("one softmax over keys in ascending blocks, the contract's", _attended),
    (
        "softmaxes of splits of one size, merged in order, the contract's",
        lambda given: _attended(given, given.split),
    ),
    ("the library's scaled-dot-product attention", _library_attended),
    *(
        (f"softmaxes of {n} ranges of keys, merged", partial(_merged, n))
        for n in range(2, MAX_RANGES + 1)
    ),
]
_VALUES: list[Variant] = [
    ("kept as they are, the contract's", lambda given: given.x[0]),
    ("rounded to bfloat16", lambda given: given.x[0].bfloat16()),
]
_ACT: list[Variant] = [
    ("float32 inside with one rounding, the contract's", lambda given: silu_mul(*given.x)),
    (
        "the library's SiLU, rounded, then the product",
        lambda given: F.silu(given.x[0]) * given.x[1],
    ),
]
_OTHERS = {
    "input_norm": _NORM,
    "post_norm": _NORM,
    "final_norm": _NORM,
    "q": _ROPE,
    "k": _ROPE,
    "v": _VALUES,
    "attention": _ATTENTION,
    "act": _ACT,
    "logprob": _LOGPROB,
}
