"""Products of heads on NVIDIA GPUs: one launch for all of them.

A tile has a fixed number of tokens of one head, and a sum runs over its inputs in ascending order.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, DEPTH = 64, 64, 64


def products_of_heads(x: Tensor, weights: Tensor) -> Tensor:
    """Shape: as `of_heads.linear_of_heads`, of any strides."""
    (num_tokens, heads, inputs), outputs = x.shape, weights.shape[1]
    out = x.new_empty(num_tokens, heads, outputs)
    _multiply[(triton.cdiv(num_tokens, ROWS), triton.cdiv(outputs, COLUMNS), heads)](
        x, weights, out, *x.stride(), *weights.stride(), num_tokens, heads, outputs, inputs,
        ROWS, COLUMNS, DEPTH, num_warps=4, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def _multiply(
    x, weights, out, token_stride, head_stride, stride, weight_stride, row_stride, column_stride,
    num_tokens, heads, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    head, is_token, is_column = tl.program_id(2), token < num_tokens, column < OUTPUTS
    rows = x + token.to(tl.int64) * token_stride + head * head_stride
    columns = weights + head.to(tl.int64) * weight_stride + column * row_stride
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, INPUTS, DEPTH):
        place = start + tl.arange(0, DEPTH)
        along, down = place[None, :], place[:, None]
        left = tl.load(rows + along * stride, mask=is_token & (along < INPUTS), other=0.0)
        right = tl.load(columns + down * column_stride, mask=is_column & (down < INPUTS), other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    to = out + (token.to(tl.int64) * heads + head) * OUTPUTS + column
    tl.store(to, total.to(out.dtype.element_ty), mask=is_token & is_column)
