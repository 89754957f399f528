"""How weights in few bits lie in memory: dtypes, shapes and bytes of codes and scales. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

BLOCK = 128  # columns of a block, in every format: a step of a kernel along K has whole blocks


@dataclass(frozen=True)
class CodeLayout:
    """Codes and scales of a weight [N, K] in one format.

    A scale is that of a block of `block_rows` rows and `BLOCK` columns. `rule` is how weights are
    rounded, as a contract and a plan say it.
    """

    name: str
    bits: int
    code_dtype: str  # of a byte
    scale_dtype: str
    scale_bytes: int
    block_rows: int
    rule: str

    @property
    def per_byte(self) -> int:
        """How many codes a byte has."""
        return 8 // self.bits

    def code_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape of a weight's codes, of which each element is a byte."""
        rows, columns = shape
        if self.per_byte == 1:
            return rows, columns
        return rows, -(-columns // BLOCK) * (BLOCK // self.per_byte)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape of a weight's scales."""
        rows, columns = shape
        return -(-rows // self.block_rows), -(-columns // BLOCK)

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a weight: of its codes and scales."""
        return prod(self.code_shape(shape)) + prod(self.scale_shape(shape)) * self.scale_bytes


UNCODED = "as they are: embeddings, head, norms, routers, biases"
E4M3 = CodeLayout(
    name="e4m3",
    bits=8,
    code_dtype="float8_e4m3fn",
    scale_dtype="float32",
    scale_bytes=4,
    block_rows=128,
    rule=(f"e4m3 codes in blocks of 128 x 128 with power-of-two scales; {UNCODED}"),
)
INT4 = CodeLayout(
    name="int4",
    bits=4,
    code_dtype="uint8",
    scale_dtype="bfloat16",
    scale_bytes=2,
    block_rows=1,
    rule=(
        "codes from -7 to 7 in groups of 128 columns of a row with scales of 5 significant bits; "
        f"{UNCODED}"
    ),
)
LAYOUTS = {one.name: one for one in (E4M3, INT4)}
