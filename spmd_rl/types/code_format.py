"""CodeFormat: a format of weights in few bits: its codes and scales in memory, and how it rounds.

Code times scale is exactly a bfloat16 number, so a product with decoded weights is an ordinary
product of bfloat16. A scale depends on its block alone, and a code on its own value and its scale.
So any rows of a weight can be encoded alone, once the scales are known. No torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor


class CodeFormat(ABC):
    """A format of weights; a subclass says which scales there are, and which codes.

    A scale is that of a block of `block_rows` rows and `block_columns` columns. `rule` is how
    weights are rounded, as a contract and a plan say it. With `has_kernels`, kernels on GPUs know
    the codes by their `bits`; without, a product decodes the weight first. Where model folders hold
    such weights, `folder` is what their config.json says of them, and `file_dtype` that of codes.
    """

    name: ClassVar[str]
    bits: ClassVar[int]
    code_dtype: ClassVar[str]  # of a byte
    scale_dtype: ClassVar[str]
    scale_bytes: ClassVar[int]
    block_rows: ClassVar[int]
    block_columns: ClassVar[int]
    rule: ClassVar[str]
    has_kernels: ClassVar[bool] = False
    folder: ClassVar[Mapping[str, object]] = {}
    file_dtype: ClassVar[str] = ""

    @abstractmethod
    def scales_of(self, maxima: Tensor) -> Tensor:
        """Return the scales of blocks with these largest magnitudes; NaN for what is too large.

        Shape: any, fp32; returns the same.
        """

    @abstractmethod
    def nearest(self, scaled: Tensor) -> Tensor:
        """Return the nearest codes to numbers that are divided by their scales.

        Shape: [n, K] fp32; returns the codes of n rows.
        """

    @abstractmethod
    def numbers(self, codes: Tensor, num_columns: int) -> Tensor:
        """Return what codes are without scales. Shape: codes of n rows; returns [n, K] fp32."""

    @property
    def per_byte(self) -> int:
        """How many codes a byte has."""
        return 8 // self.bits

    def code_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape of a weight's codes, of which each element is a byte."""
        rows, columns = shape
        if self.per_byte == 1:
            return rows, columns
        blocks = -(-columns // self.block_columns)
        return rows, blocks * (self.block_columns // self.per_byte)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape of a weight's scales."""
        rows, columns = shape
        return -(-rows // self.block_rows), -(-columns // self.block_columns)

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a weight: of its codes and scales."""
        return prod(self.code_shape(shape)) + prod(self.scale_shape(shape)) * self.scale_bytes


UNCODED = "as they are: embeddings, head, norms, routers, biases"
