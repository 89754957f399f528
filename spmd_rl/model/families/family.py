"""Family: how the folders of a kind of model are read, and what its name is elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spmd_rl.model.families.folder_layout import PLAIN, FolderLayout
from spmd_rl.model.json_fields import Fields
from spmd_rl.model.layers.block import BlockSpec

Blocks = tuple[tuple[BlockSpec, ...], int]  # and how many elements of a head are rotated


@dataclass(frozen=True)
class Family:
    """Models with one `model_type`.

    `read` makes blocks of the fields of a config.json; as in transformers, absent keys have
    defaults, and keys that transformers ignores are ignored. `class_name` is what the names of
    transformers' classes begin with. `unused` returns how the names of tensors begin that a folder
    may hold and that the network does not have, as transformers has it: an export copies them. A
    hybrid family reads `layer_types` itself. `layout` is that of its folders. With a `prefix`, the
    model is the text model within a folder (`text_config.py`), whose names begin so there.
    """

    class_name: str
    read: Callable[[Fields], Blocks]
    unused: Callable[[Fields], tuple[str, ...]] = lambda config: ()
    is_hybrid: bool = False
    prefix: str = ""
    layout: FolderLayout = PLAIN
