"""Names of a model's weights in the folder that it is written to, where they are not its own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from spmd_rl.model.families import FAMILIES
from spmd_rl.model.families.folder_layout import BIAS, STACKED_IN_FILES, FolderLayout
from spmd_rl.model.spec import ModelSpec
from spmd_rl.model.weight_files import OWN_PREFIX, has_weights, stored_tensors

TypedTensor = tuple[str, Tensor, torch.dtype]  # a tensor's name, and the dtype to write it in
_OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.(weight|bias)")
_STACKS = {part: kind for kind, parts in STACKED_IN_FILES.items() for part in parts}


def as_in_folder(
    tensors: Iterable[TypedTensor], spec: ModelSpec, like: str | Path
) -> Iterator[TypedTensor]:
    """Yield weights as the folder `like` has them, whose config is that of `spec`.

    A text model within a folder has other names there, and a family may have some. Its experts are
    stacked, unless the weights of `like` are not: those of a layer wait until all are there.
    """
    layout = FAMILIES[spec.family].layout
    if not (spec.folder_prefix or layout.renamed):
        yield from tensors
        return
    stacks = layout.is_interleaved or _has_stacks(like)
    waiting: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, tensor, dtype in tensors:
        key = layout.folder_name(name)
        if spec.folder_prefix and name.startswith(OWN_PREFIX):
            key = spec.folder_prefix + name.removeprefix(OWN_PREFIX)
        found = _OF_EXPERT.fullmatch(key)
        if found is None or not stacks:
            yield key, tensor, dtype
            continue
        layer, expert, projection, whose = found.groups()
        kind = _STACKS[projection]
        stack = f"{layer}.{kind}" + (BIAS if whose == "bias" else "")
        parts = waiting.setdefault(stack, {})
        # the caller may use the memory of a tensor again for the next
        parts[int(expert), projection] = tensor.detach().to("cpu", dtype, copy=True)
        if len(parts) == len(STACKED_IN_FILES[kind]) * spec.num_experts:
            yield stack, _stacked(waiting.pop(stack), STACKED_IN_FILES[kind], layout), dtype
    assert not waiting, "a layer lacks some of its experts"


def _has_stacks(like: str | Path) -> bool:
    """Whether experts are stacked in a folder, or would be as it has no weights."""
    return not has_weights(like) or any(
        key.rpartition(".")[2] in STACKED_IN_FILES and ".experts." in key
        for key in stored_tensors(like)
    )


def _stacked(
    parts: Mapping[tuple[int, str], Tensor], names: tuple[str, ...], layout: FolderLayout
) -> Tensor:
    """Return the tensors of all experts as the one of a folder (`FolderLayout`)."""
    rows = []
    for expert in range(len(parts) // len(names)):
        each = [parts[expert, name] for name in names]
        if layout.is_interleaved:
            whole = torch.stack(each, 1).flatten(0, 1)
            rows.append(whole.t() if whole.dim() == 2 else whole)
        else:
            rows.append(torch.cat(each))
    return torch.stack(rows)
