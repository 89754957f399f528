"""Runs the few instructions of PTX by which kernels unpack codes, on words of the host."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
_LINE = re.compile(r"^\s*([a-z][\w.]*) (.+);$", re.MULTILINE)


def run(source: str, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return all registers after `source`. Registers are words of 32 bits: [n] int64."""
    registers = dict(given)

    def value(name: str) -> Tensor:
        if name in registers:
            return registers[name]
        return torch.full_like(next(iter(given.values())), int(name, 0))

    for operation, operands in _LINE.findall(source):
        target, *sources = operands.split(", ")
        registers[target] = OPERATIONS[operation](*map(value, sources)) & WORD
    return registers


def pair(words: Tensor) -> Tensor:
    """Return the two bfloat16 numbers of each word, the low one first. Shape: [n]; [n, 2]."""
    halves = torch.stack([words & 0xFFFF, words >> 16], 1)
    return halves.where(halves < 1 << 15, halves - (1 << 16)).to(torch.int16).view(torch.bfloat16)


def word(numbers: Tensor) -> Tensor:
    """Return pairs of bfloat16 numbers as words. Shape: [n, 2]; [n]."""
    bits = numbers.contiguous().view(torch.int16).long() & 0xFFFF
    return bits[:, 0] | bits[:, 1] << 16


def _permuted(low: Tensor, high: Tensor, choice: Tensor) -> Tensor:
    both = low | high << 32
    found = torch.zeros_like(low)
    for place in range(4):
        found |= ((both >> 8 * ((choice >> 4 * place) & 7)) & 0xFF) << 8 * place
    return found


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shr.b32": lambda a, b: a >> b,
    "prmt.b32": _permuted,
    "mul.rn.bf16x2": lambda a, b: word(pair(a) * pair(b)),
    "sub.rn.bf16x2": lambda a, b: word(pair(a) - pair(b)),
}
