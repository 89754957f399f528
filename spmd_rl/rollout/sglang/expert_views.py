"""Parts of SGLang's expert parameters: it stacks those of a layer's experts, [E, rows, columns]."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from spmd_rl.model.layers.moe import STACKED
from spmd_rl.weights.plan.layout import Piece

# the method that keeps each expert's weights as Hugging Face has them, and its attributes that say
# that it does not: transposed, swapped or in blocks
# Source: sglang 0.5.17, layers/quantization/unquant.py and layers/moe/fused_moe_triton/layer.py
PLAIN_METHOD = "UnquantizedFusedMoEMethod"
OTHER_LAYOUTS = ("use_triton_kernels", "load_up_proj_weight_first", "use_flashinfer_trtllm_moe")


def expert_views(model: Any, pieces: Mapping[str, Piece]) -> Iterator[tuple[str, Tensor]]:
    """Yield each expert's tensors with their parts of stacked parameters, where they are plain.

    A rank stacks its own experts alone, in the order of their numbers. `pieces` are of these.
    """
    for path, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if type(method).__name__ != PLAIN_METHOD:
            continue
        if any(getattr(method, name, False) for name in OTHER_LAYOUTS):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if name in STACKED:
                yield from _parts(f"{path}.", STACKED[name], parameter.detach(), pieces)


def _parts(
    path: str, parts: tuple[str, ...], parameter: Tensor, pieces: Mapping[str, Piece]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parts of one parameter. There are none if it has other sizes than the pieces."""
    found: dict[str, Tensor] = {}
    own = {name.removeprefix(path).split(".")[0] for name in pieces if name.startswith(path)}
    numbers = sorted(map(int, own))
    if len(numbers) != len(parameter):
        return
    for number, of_expert in zip(numbers, parameter, strict=True):
        start = 0
        for part in parts:
            name = f"{path}{number}.{part}.weight"
            if (piece := pieces.get(name)) is None:
                return
            view = of_expert[start : start + piece.box.extent[0]]
            if tuple(view.shape) != piece.box.extent or view.dtype != getattr(torch, piece.dtype):
                return
            found[name] = view
            start += len(view)
        if start != len(of_expert):
            return
    yield from found.items()
