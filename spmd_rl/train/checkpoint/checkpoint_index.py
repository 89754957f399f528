"""Index of a trainer's checkpoint: which box of which tensor lies in which file. Pure, no torch.

    trainer/
        index.json                        this index: written last, read first
        weights-00000-000.safetensors     rank 0's part of the weights, in files of about a GiB
        exp_avg-00000-000.safetensors     rank 0's part of the optimizer's first moments

A tensor is one or more boxes that do not overlap. A box lies in a file under a key. So any number
of ranks can read what any other number wrote. The schema is closed: an unknown field, a missing
box or an unexpected file name is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Annotated

import msgspec

from spmd_rl.errors import ConfigError, SpmdError
from spmd_rl.train.checkpoint.trainer_state import TrainerState
from spmd_rl.weights.plan.layout import ITEM_BYTES, Box, Dims, PiecesByKind, disjoint

INDEX_FILE = "index.json"
FORMAT = 1
WEIGHTS = "weights"  # the kind of tensor that every checkpoint holds
OLD_FILES = ("trainer.json", ".metadata")  # of the previous format, which held pickles

Count = Annotated[int, msgspec.Meta(ge=0)]
FileName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]+\.safetensors\Z", max_length=200)]


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One box of a tensor, and the file and key that it lies under."""

    offset: tuple[Count, ...]
    extent: tuple[Count, ...]
    file: FileName
    key: str

    @property
    def box(self) -> Box:
        return Box(self.offset, self.extent)


class SavedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor of global `shape` in disjoint shards that cover it."""

    shape: tuple[Count, ...]
    dtype: str
    shards: list[Shard]


TensorsByKind = dict[str, dict[str, SavedTensor]]  # by kind, and then by canonical name


class WrittenByRank(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's files with their CRC-32, and its shards by kind and tensor; or its error."""

    files: dict[FileName, Count] = {}
    shards: dict[str, dict[str, list[Shard]]] = {}
    error: str = ""


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of index.json.

    `tensors` go by kind and canonical name, `files` are the CRC-32 of each file, and `contract` is
    the numeric one.
    """

    format: int
    progress: TrainerState
    contract: dict[str, str | int]
    files: dict[FileName, Count]
    tensors: TensorsByKind

    @property
    def weights_alone(self) -> bool:
        """Whether the checkpoint holds no state of an optimizer."""
        return set(self.tensors) == {WEIGHTS}

    def problem(self) -> str:
        """Return what is wrong with the index, as a clause; empty if it is fine."""
        if WEIGHTS not in self.tensors:
            return f"it holds no {WEIGHTS}"
        for kind, tensors in self.tensors.items():
            for name, tensor in tensors.items():
                if clause := _problem(tensor, self.files):
                    return f"{kind} of '{name}' {clause}"
        return ""


def read_index(folder: Path) -> Index:
    """Return the index of a checkpoint's folder.

    Raises: ConfigError where there is none or one of another format; SpmdError where it is damaged.
    """
    path = folder / INDEX_FILE
    if not path.is_file():
        if any((folder / name).is_file() for name in OLD_FILES):
            raise ConfigError(
                f"{folder} is a checkpoint of an older version of spmd_rl, which is no longer "
                "read: go on with the version that wrote it, or start from the model that its run "
                "exported to hf/"
            )
        raise ConfigError(f"{folder} is not a trainer checkpoint: it has no {INDEX_FILE}")
    try:
        index = msgspec.json.decode(path.read_bytes(), type=Index)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise SpmdError(f"{path} is not as it was written: {error}") from error
    if index.format != FORMAT:
        raise ConfigError(
            f"{path} has format {index.format}, and this version of spmd_rl reads format {FORMAT}"
        )
    if problem := index.problem():
        raise SpmdError(f"{path} is not as it was written: {problem}")
    return index


def merged(
    trainer_state: TrainerState,
    contract: Mapping[str, str | int],
    layouts: Sequence[PiecesByKind],
    written: Sequence[WrittenByRank],
) -> Index:
    """Return the index of what all ranks wrote. `layouts` are the pieces of each rank.

    Raises: SpmdError where the shards of a tensor do not cover it, which is a fault of the backend.
    """
    tensors = _saved_tensors(layouts, written)
    files = {name: checksum for rank in written for name, checksum in rank.files.items()}
    index = Index(FORMAT, trainer_state, dict(contract), files, tensors)
    if problem := index.problem():
        raise SpmdError(f"the ranks did not write whole tensors: {problem}")
    return index


def _saved_tensors(
    layouts: Sequence[PiecesByKind], written: Sequence[WrittenByRank]
) -> TensorsByKind:
    """Return every tensor by kind and name, with the shards that the ranks wrote of it."""
    pieces = {
        (kind, piece.name): piece for layout in layouts for kind in layout for piece in layout[kind]
    }
    tensors: TensorsByKind = defaultdict(dict)
    for (kind, name), piece in pieces.items():
        shards = [shard for rank in written for shard in rank.shards.get(kind, {}).get(name, [])]
        tensors[kind][name] = SavedTensor(piece.shape, piece.dtype, shards)
    return dict(tensors)


def share(layouts: Sequence[PiecesByKind], rank: int) -> dict[str, list[int]]:
    """Return which of its pieces `rank` writes, by kind, as indices into its layout.

    Ranks with the same box write it in rotation: the first such box is the first rank's.
    """
    own: dict[str, list[int]] = {kind: [] for kind in layouts[rank]}
    for number, ((kind, _, _), copies) in enumerate(_copies_of_boxes(layouts).items()):
        writer, index = copies[number % len(copies)]
        if writer == rank:
            own[kind].append(index)
    return own


def _copies_of_boxes(
    layouts: Sequence[PiecesByKind],
) -> dict[tuple[str, str, Box], list[tuple[int, int]]]:
    """Return by kind, name and box each rank that has this box, and its index in the layout."""
    copies: dict[tuple[str, str, Box], list[tuple[int, int]]] = defaultdict(list)
    for rank, layout in enumerate(layouts):
        for kind, pieces in layout.items():
            for index, piece in enumerate(pieces):
                if piece.box.num_elements:
                    copies[kind, piece.name, piece.box].append((rank, index))
    return copies


def _problem(tensor: SavedTensor, files: Mapping[str, int]) -> str:
    """Return what is wrong with a tensor, as a clause; empty if it is fine."""
    if tensor.dtype not in ITEM_BYTES:
        return f"has the unknown type '{tensor.dtype}'"
    for shard in tensor.shards:
        if len(shard.offset) != len(tensor.shape) or len(shard.extent) != len(tensor.shape):
            return "has a shard of another number of dims"
        if any(end > size for end, size in zip(shard.box.end, tensor.shape, strict=True)):
            return "has a shard that reaches beyond it"
        if shard.file not in files:
            return f"lies in {shard.file}, which is none of its files"
    boxes = [shard.box for shard in tensor.shards]
    return "" if _tile(tensor.shape, boxes) else "is not covered by its shards once"


def _tile(shape: Dims, boxes: Sequence[Box]) -> bool:
    """Return whether `boxes`, all inside `shape`, cover each element once."""
    whole = sum(box.num_elements for box in boxes) == prod(shape)
    return whole and len(set(boxes)) == len(boxes) and disjoint(boxes)
