"""Names of a model's weights in the folder that it is written to, where they are not its own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from spmd_rl.model.layers.moe import STACKED_IN_FILES
from spmd_rl.model.spec import ModelSpec
from spmd_rl.model.weight_files import OWN_PREFIX, has_weights, stored_tensors

TypedTensor = tuple[str, Tensor, torch.dtype]  # a tensor's name, and the dtype to write it in
_OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
_STACKS = {part: kind for kind, parts in STACKED_IN_FILES.items() for part in parts}


def as_in_folder(
    tensors: Iterable[TypedTensor], spec: ModelSpec, like: str | Path
) -> Iterator[TypedTensor]:
    """Yield weights as the folder `like` has them, whose config is that of `spec`.

    A text model within a folder has other names there. Its experts are stacked, unless the weights
    of `like` are not: those of a layer wait until all are there.
    """
    if not spec.folder_prefix:
        yield from tensors
        return
    stacks = not has_weights(like) or any(
        key.rpartition(".")[2] in STACKED_IN_FILES and ".experts." in key
        for key in stored_tensors(like)
    )
    waiting: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, tensor, dtype in tensors:
        key = name
        if name.startswith(OWN_PREFIX):
            key = spec.folder_prefix + name.removeprefix(OWN_PREFIX)
        found = _OF_EXPERT.fullmatch(key)
        if found is None or not stacks:
            yield key, tensor, dtype
            continue
        layer, expert, projection = found.groups()
        kind = _STACKS[projection]
        parts = waiting.setdefault(f"{layer}.{kind}", {})
        # the caller may use the memory of a tensor again for the next
        parts[int(expert), projection] = tensor.detach().to("cpu", dtype, copy=True)
        names = STACKED_IN_FILES[kind]
        if len(parts) == len(names) * spec.num_experts:
            rows = [
                torch.cat([parts[number, one] for one in names])
                for number in range(spec.num_experts)
            ]
            del waiting[f"{layer}.{kind}"]
            yield f"{layer}.{kind}", torch.stack(rows), dtype
    assert not waiting, "a layer lacks some of its experts"
