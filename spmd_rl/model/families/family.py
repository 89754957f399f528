"""Family: how the folders of a kind of model are read, and what its name is elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spmd_rl.model.json_fields import Fields
from spmd_rl.model.layers.block import BlockSpec

Blocks = tuple[tuple[BlockSpec, ...], int]  # and how many elements of a head are rotated


@dataclass(frozen=True)
class Family:
    """Models with one `model_type`.

    `read` makes blocks of the fields of a config.json; as in transformers, absent keys have
    defaults, and keys that transformers ignores are ignored. `class_name` is what the names of
    transformers' classes begin with.
    """

    class_name: str
    read: Callable[[Fields], Blocks]
