"""Square norm of gradients whose bits do not depend on which rank has which elements.

Each square is cut into whole numbers of a few units, the largest of which follow from the largest
gradient and the number of elements. Sums of whole numbers are exact in float64, in any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import frexp, isfinite

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.model.spec import ModelSpec
from spmd_rl.train.config import TrainerConfig

DIGITS = 3  # units, each finer than the one before by what a sum of all elements leaves of 52 bits
MANTISSA_BITS = 52
CHUNK_ELEMENTS = 1 << 22  # that are squared at once


def has_exact_norm(spec: ModelSpec, cfg: TrainerConfig) -> bool:
    """Whether the norm is the same however many ranks share experts, or parts of the data."""
    return cfg.deterministic and (spec.num_experts > 0 or cfg.data_parts > 0)


def exact_square_norm(
    gradients: Sequence[Tensor], num_elements: int, group: dist.ProcessGroup
) -> float | None:
    """Return the square norm of the gradients of all ranks, or None if it is not finite.

    `num_elements` is at least the number of them on all ranks.
    Ranks: all of the group, with float32 gradients on the group's device. Blocks: until each has
    called.
    """
    device = gradients[0].device if gradients else torch.device("cpu")
    largest = _largest(gradients, device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    if not isfinite(top := float(largest)):
        return None
    bits = MANTISSA_BITS - num_elements.bit_length()
    # squares times 2^shift are at most 2^bits, and so a sum of all of them is at most 2^52
    shift = bits - 2 * frexp(top)[1]
    sums = torch.zeros(DIGITS, dtype=torch.float64, device=device)
    _add_digits(sums, gradients, shift, bits)
    dist.all_reduce(sums, group=group)
    total = 0.0
    for digit in reversed(sums.tolist()):
        total = digit + total * 2.0**-bits
    return total * 2.0**-shift


def _add_digits(sums: Tensor, gradients: Sequence[Tensor], shift: int, bits: int) -> None:
    """Add the digits of all squares to `sums` [DIGITS] fp64."""
    if not sums.is_cuda:
        for chunk in _chunks(gradients):
            sums += _digit_sums(chunk, shift, bits)
        return
    from spmd_rl.kernels.rowwise.square_digits_triton import add_square_digits

    for gradient in gradients:
        add_square_digits(sums, gradient.contiguous(), shift, bits)


def _digit_sums(chunk: Tensor, shift: int, bits: int) -> Tensor:
    """Return the sum of each digit of the squares. Shape: [N]; returns [DIGITS] fp64."""
    rest = chunk.double() * 2.0 ** (shift // 2)
    rest = rest.square_().mul_(2.0 ** (shift % 2))
    found = []
    for _ in range(DIGITS):
        digit = rest.round()
        found.append(digit.sum())
        rest = rest.sub_(digit).mul_(2.0**bits)
    return torch.stack(found)


def _largest(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the largest magnitude, infinite where one of them is not finite. Shape: [] fp64."""
    some = [one for one in gradients if one.numel()]
    if not some:
        return torch.zeros((), dtype=torch.float64, device=device)
    largest = torch.stack(torch._foreach_norm(some, float("inf"))).max().double()
    return largest.nan_to_num(nan=float("inf"), posinf=float("inf"))


def _chunks(gradients: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield all elements, in flat tensors of about as many as are squared at once."""
    waiting: list[Tensor] = []
    for gradient in gradients:
        for part in gradient.flatten().split(CHUNK_ELEMENTS):
            waiting.append(part)
            if sum(map(len, waiting)) >= CHUNK_ELEMENTS:
                yield torch.cat(waiting)
                waiting = []
    if waiting:
        yield torch.cat(waiting)
