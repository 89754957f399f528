"""How a folder holds what the network has otherwise: names, and the experts of a layer.

Shape letters: E experts, N and K rows and columns of an expert's weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

# tensors of all experts of a layer, and what each expert's rows are, in order
STACKED_IN_FILES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
BIAS = "_bias"  # how the name of the biases of all experts ends


class ExpertPart(NamedTuple):
    """An expert's tensor in a stacked one: rows from `start` on, each `step`th.

    With `is_transposed`, they are columns of what the folder has.
    """

    expert: int
    start: int
    step: int = 1
    is_transposed: bool = False


@dataclass(frozen=True)
class FolderLayout:
    """Experts in a tensor `gate_up_proj` and a tensor `down_proj`, if a folder stacks them.

    As transformers writes them, these are [E, 2 N, K], gates above units, and [E, K, N]. With
    `is_interleaved`, as in gpt-oss, each is transposed, a gate is beside its unit, and biases are
    [E, 2 N] and [E, K]. `renamed` are parts of names in the network, and what they are in a folder.
    """

    is_interleaved: bool = False
    renamed: tuple[tuple[str, str], ...] = ()

    def own_name(self, key: str) -> str:
        """Return the network's name of what a folder calls `key`."""
        for own, theirs in self.renamed:
            key = key.replace(theirs, own)
        return key

    def folder_name(self, name: str) -> str:
        """Return what a folder calls the network's tensor `name`."""
        for own, theirs in self.renamed:
            name = name.replace(own, theirs)
        return name

    def parts(
        self, kind: str, shape: tuple[int, ...], in_rows: bool
    ) -> Iterator[tuple[str, tuple[int, ...], ExpertPart]]:
        """Yield what a tensor with this last name and shape holds; nothing if it holds no experts.

        It is each expert's tensor: its name below the mixture's `experts`, its shape and part.
        `in_rows` says that an interleaved weight is not transposed, as one in few bits.
        """
        is_bias = self.is_interleaved and kind.endswith(BIAS)
        names = STACKED_IN_FILES.get(kind.removesuffix(BIAS) if is_bias else kind, ())
        if not names or len(shape) != (2 if is_bias else 3):
            return
        is_transposed = self.is_interleaved and not (is_bias or in_rows)
        num_experts, rows, *columns = (shape[0], *shape[:0:-1]) if is_transposed else shape
        if rows % len(names) == 0:  # else the shapes are refused
            rows //= len(names)
        whose = "bias" if is_bias else "weight"
        for expert in range(num_experts):
            for number, name in enumerate(names):
                part = ExpertPart(expert, number * rows, 1, is_transposed)
                if self.is_interleaved:
                    part = part._replace(start=number, step=len(names))
                yield f"{expert}.{name}.{whose}", (rows, *columns), part


PLAIN = FolderLayout()
INTERLEAVED = FolderLayout(is_interleaved=True, renamed=((".mlp.gate.", ".mlp.router."),))
