"""Codes of keys and values on NVIDIA GPUs, each element read and written once."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.runtime.padding import dense_heads

BLOCK = 1024  # elements of a program at most
LARGEST = tl.constexpr(torch.finfo(torch.float8_e4m3fn).max)


def encode_on_gpu(x: Tensor, exponent: int, clipped: Tensor | None) -> Tensor:
    """Return the codes of keys or values, as `kv_codes.encode_kv` does."""
    out = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    _of_tokens(x, out, exponent, clipped, decodes=False)
    return out


def round_on_gpu(x: Tensor, exponent: int) -> Tensor:
    """Return what the codes of keys or values stand for, as `kv_codes.round_kv` does."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _of_tokens(x, out, exponent, None, decodes=True)
    return out


def decode_pages_on_gpu(codes: Tensor, pages: Tensor, exponent: int, dtype: torch.dtype) -> Tensor:
    """Return what the codes of some pages stand for, as `kv_codes.decode_pages` does."""
    num_parts, num_pages = codes.shape[:2]
    out = torch.empty((num_parts, len(pages), *codes.shape[2:]), dtype=dtype, device=codes.device)
    width = codes[0, 0].numel()
    grid = num_parts * len(pages), triton.cdiv(width, BLOCK)
    _convert[grid](
        codes, out, pages, None, 2.0**exponent, width, width, num_pages, len(pages),
        False, True, BLOCK, num_warps=4,
    )  # fmt: skip
    return out


def _of_tokens(
    x: Tensor, out: Tensor, exponent: int, clipped: Tensor | None, *, decodes: bool
) -> None:
    if not len(x):
        return
    x = dense_heads(x)
    width = x[0].numel()
    _convert[len(x), triton.cdiv(width, BLOCK)](
        x, out, None, clipped, 2.0**exponent, x.stride(0), width, 1, 1,
        True, decodes, BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_pages", "num_chosen"])
def _convert(
    given, out, pages, clipped, scale, stride, width, num_pages, num_chosen,
    ENCODES: tl.constexpr, DECODES: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_held = column < width
    source = row
    if pages is not None:
        source = row // num_chosen * num_pages + tl.load(pages + row % num_chosen)
    value = tl.load(given + source * stride + column, mask=is_held, other=0)
    if ENCODES:
        code = nearest_codes(value, scale, clipped)
    else:
        code = value.to(tl.float8e4nv, bitcast=True)
    if DECODES:
        result = (code.to(tl.float32) * scale).to(out.dtype.element_ty)
    else:
        result = code.to(tl.uint8, bitcast=True)
    tl.store(out + row * width + column, result, mask=is_held)


@triton.jit
def nearest_codes(value, scale, clipped) -> tl.tensor:
    """Return the codes of some elements, and add the number of those beyond the largest one to
    `clipped`, if it is given.
    """
    scaled = value.to(tl.float32) * tl.div_rn(1.0, scale)
    if clipped is not None:
        count = tl.sum((tl.abs(scaled) > LARGEST).to(tl.int64))
        if count > 0:
            tl.atomic_add(clipped, count, sem="relaxed")
    scaled = tl.where(scaled > LARGEST, LARGEST, scaled)  # NaN stays NaN
    return tl.where(scaled < -LARGEST, -LARGEST, scaled).to(tl.float8e4nv)


@triton.jit
def stored(value, scale, counts, like) -> tl.tensor:
    """Return elements as a cache holds them: as they are, or as codes where it has `counts`.

    `counts` [2] is that of `kv_codes.KvCoding`. Elements that are not stored must be 0.
    """
    if counts is not None:
        return nearest_codes(value, scale, counts + 1).to(tl.uint8, bitcast=True)
    return value.to(like.dtype.element_ty)
