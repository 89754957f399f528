"""Variants: known ways of computing an op, of the contract, of the libraries and of common faults.

Each is a function of the op's inputs, for rows that were computed together.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_rl.kernels import (
    PackedAttention,
    pad_rows,
    rms_norm,
    rope,
    rope_table,
    silu_mul,
    token_logprobs,
)
from spmd_rl.microscope.diagnose.product_variants import products
from spmd_rl.microscope.diagnose.variant_inputs import Compute, Variant, VariantInputs
from spmd_rl.microscope.replay.split_reference import merged_attention
from spmd_rl.model.attention import head_size
from spmd_rl.model.formats.coded_cache import Exponents
from spmd_rl.model.rope_frequencies import inverse_frequencies
from spmd_rl.model.spec import ModelSpec

MAX_RANGES = 8


def variants(op: str, is_product: bool = False) -> list[Variant]:
    """Return the variants of an op; of a product with a weight, those of any product."""
    return products(op) if is_product else _OTHERS.get(op, [])


def variants_from_source(op: str) -> list[Variant]:
    """Return the variants of an op that begins with its own projections.

    They are each variant of the products with each variant of what follows.
    """
    return [
        (f"{product}, then {rest}", partial(_after_products, multiply, compute))
        for product, multiply in products()
        for rest, compute in variants(op)
    ]


def _after_products(multiply: Compute, compute: Compute, inputs: VariantInputs) -> Tensor:
    assert inputs.source is not None
    alone = replace(inputs, x=(inputs.source,))
    return compute(
        replace(inputs, x=tuple(multiply(replace(alone, module=one)) for one in inputs.projections))
    )


def _normed(inputs: VariantInputs) -> Tensor:
    return rms_norm(inputs.x[0], inputs.module.weight, inputs.spec.rms_eps)


def _scaled_before_rounding(inputs: VariantInputs) -> Tensor:
    x = inputs.x[0]
    return (x.float() * (_inverse_root(x, inputs) * inputs.module.weight.float())).to(x.dtype)


def _scaled_unrounded_sum(inputs: VariantInputs) -> Tensor:
    """Return the norm of the last sum in float32, as kernels do that add and norm at once."""
    total = inputs.x[1].float() + inputs.x[2].float()
    scaled = total * (_inverse_root(total, inputs) * inputs.module.weight.float())
    return scaled.to(inputs.x[0].dtype)


def _library_norm(x: Tensor, inputs: VariantInputs) -> Tensor:
    return inputs.module.weight * (x.float() * _inverse_root(x, inputs)).to(x.dtype)


def _inverse_root(x: Tensor, inputs: VariantInputs) -> Tensor:
    return torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + inputs.spec.rms_eps)


def _rotated(inputs: VariantInputs) -> Tensor:
    return rope(_before_rope(inputs), *_tables(inputs))


def _rotated_by_rounded_tables(inputs: VariantInputs) -> Tensor:
    cos, sin = (table.bfloat16().float() for table in _tables(inputs))
    return rope(_before_rope(inputs), cos, sin)


def _before_rope(inputs: VariantInputs) -> Tensor:
    """Return the projection by heads, normed if the model norms them."""
    x = _heads(inputs.x[0], inputs.spec)
    return x if inputs.module is None else rms_norm(x, inputs.module.weight, inputs.spec.rms_eps)


def _library_rotated(inputs: VariantInputs) -> Tensor:
    x = _heads(inputs.x[0], inputs.spec)
    x = x if inputs.module is None else _library_norm(x, inputs)
    cos, sin = (
        torch.cat([table, table], -1).to(x.dtype).unsqueeze(1)
        for table in _library_tables(inputs, x.device)
    )
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _library_tables(inputs: VariantInputs, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, computed on the device as the library does it."""
    angles = inputs.positions.float()[:, None] * inverse_frequencies(inputs.spec.rope).to(device)
    factor = inputs.spec.rope.attention_factor
    return angles.cos() * factor, angles.sin() * factor


def _tables(inputs: VariantInputs) -> tuple[Tensor, Tensor]:
    rope, positions = inputs.spec.rope, inputs.positions
    tables = rope_table(inverse_frequencies(rope), inputs.spec.max_positions, rope.attention_factor)
    cos, sin = (table.to(positions.device)[positions] for table in tables)
    return cos, sin


def _heads(x: Tensor, spec: ModelSpec) -> Tensor:
    return x.unflatten(1, (-1, head_size(spec)))


def _attention_inputs(inputs: VariantInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values by heads; those of values may be smaller."""
    q, k, v = inputs.x
    keys = _heads(k, inputs.spec)
    return _heads(q, inputs.spec), keys, v.unflatten(1, (keys.shape[1], -1))


def _attended(inputs: VariantInputs, split: int = 0, exponents: Exponents | None = None) -> Tensor:
    q, k, v = _attention_inputs(inputs)
    lengths = np.array([len(q)], np.int32)
    attend = PackedAttention(lengths, device=q.device, split=split, exponents=exponents)
    q, k, v = pad_rows(q), pad_rows(k), pad_rows(v)
    return attend(0, q, k, v)[: len(inputs.positions)]


def _library_attended(inputs: VariantInputs) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in _attention_inputs(inputs))
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out[0].transpose(0, 1)


def _merged(ranges: int, inputs: VariantInputs) -> Tensor:
    """Return attention of the wanted rows; the others are zero."""
    q, k, v = _attention_inputs(inputs)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    for row in inputs.wanted.nonzero()[:, 0].tolist():
        if row + 1 >= ranges:
            out[row] = merged_attention(q[row], k[: row + 1], v[: row + 1], ranges)
    return out


def _scored(inputs: VariantInputs) -> Tensor:
    return token_logprobs(inputs.x[0].float(), inputs.targets, _inverse(inputs))[0].unsqueeze(1)


def _log_softmax(logits: Compute) -> Compute:
    """Return what scores by the library's log-softmax of these logits."""
    return lambda inputs: _chosen(logits(inputs).log_softmax(-1), inputs)


def _tempered(inputs: VariantInputs) -> Tensor:
    return inputs.x[0].float() * _inverse(inputs)[:, None]


def _scored_by_log_sum(inputs: VariantInputs) -> Tensor:
    z = _tempered(inputs)
    return _chosen(z, inputs) - z.logsumexp(-1, keepdim=True)


def _inverse(inputs: VariantInputs) -> Tensor:
    return 1 / inputs.temperatures  # rounded to float32, as engine and trainer do it


def _chosen(x: Tensor, inputs: VariantInputs) -> Tensor:
    return x.gather(1, inputs.targets[:, None])


_LOGPROB: list[Variant] = [
    ("exponentials summed by shards of the vocabulary, the contract's", _scored),
    ("the library's log-softmax, then one entry", _log_softmax(_tempered)),
    (
        "the library's log-softmax of logits divided by the temperature",
        _log_softmax(lambda inputs: inputs.x[0].float() / inputs.temperatures[:, None]),
    ),
    ("logit less the library's log-sum of exponentials", _scored_by_log_sum),
    (
        "the logarithm of the library's softmax",
        lambda inputs: _chosen(_tempered(inputs).softmax(-1), inputs).log(),
    ),
    (
        "the library's log-softmax of logits rounded to bfloat16",
        _log_softmax(lambda inputs: inputs.x[0].bfloat16().float() * _inverse(inputs)[:, None]),
    ),
    (
        "the library's log-softmax in bfloat16",
        _log_softmax(lambda inputs: inputs.x[0].bfloat16() * _inverse(inputs)[:, None].bfloat16()),
    ),
    (
        "the log-prob at temperature 1",
        _log_softmax(lambda inputs: inputs.x[0].float()),
    ),
]
_NORM: list[Variant] = [
    ("the contract's norm", _normed),
    (
        "torch's own mean, scaled by the weight after rounding",
        lambda inputs: _library_norm(inputs.x[0], inputs),
    ),
    ("scaled by the weight before rounding", _scaled_before_rounding),
    ("of a sum that was not rounded, scaled by the weight before rounding", _scaled_unrounded_sum),
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
        lambda inputs: _attended(inputs, inputs.split),
    ),
    (
        "the contract's softmax over keys and values rounded to codes of 8 bits",
        lambda inputs: _attended(inputs, inputs.split, inputs.exponents),
    ),
    ("the library's scaled-dot-product attention", _library_attended),
    *(
        (f"softmaxes of {n} ranges of keys, merged", partial(_merged, n))
        for n in range(2, MAX_RANGES + 1)
    ),
]
_VALUES: list[Variant] = [
    ("kept as they are, the contract's", lambda inputs: inputs.x[0]),
    ("rounded to bfloat16", lambda inputs: inputs.x[0].bfloat16()),
]
_ACT: list[Variant] = [
    ("float32 inside with one rounding, the contract's", lambda inputs: silu_mul(*inputs.x)),
    (
        "the library's SiLU, rounded, then the product",
        lambda inputs: F.silu(inputs.x[0]) * inputs.x[1],
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
