"""Weights of a model that are in 8 bits with `weights = "e4m3"`, and their names in a push.

They are the matrices of the blocks but for routers, experts' included. A push gives the codes the
name of the weight, and the scales the name that Hugging Face folders use.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from spmd_rl.model.layers.layer import TensorSpec
from spmd_rl.model.spec import ModelSpec, block_prefix

WeightFormat = Literal["full", "e4m3"]
CODE_DTYPE = "float8_e4m3fn"
E4M3_RULE = (
    "e4m3 codes in blocks of 128 x 128 with power-of-two scales; "
    "as they are: embeddings, head, norms, routers, biases"
)


def scale_name(weight: str) -> str:
    """Return the name of the scales of a weight."""
    return f"{weight}_scale_inv"


def coded_shapes(spec: ModelSpec, weights: WeightFormat) -> dict[str, tuple[int, int]]:
    """Return the shapes of the weights that are in 8 bits, by name: none with "full"."""
    if weights == "full":
        return {}
    return {
        block_prefix(number) + one.name: (one.shape[0], one.shape[1])
        for number, block in enumerate(spec.blocks)
        for one in block.parameters()
        if is_coded(one)
    }


def is_coded(one: TensorSpec) -> bool:
    """Return whether a parameter of a block can be in 8 bits."""
    return len(one.shape) == 2 and not one.is_router


def num_coded(spec: ModelSpec, weights: WeightFormat, ep: int = 1) -> int:
    """Return how many elements of a rank's weights are codes where `ep` ranks share experts."""
    if weights == "full":
        return 0
    return sum(
        count * one.num_elements // (ep if one.expert is not None else 1)
        for block, count in Counter(spec.blocks).items()
        for one in block.parameters()
        if is_coded(one)
    )


def weights_sentence(weights: WeightFormat) -> str:
    """Return what to say of the format of weights, in a plan and at the start of a run."""
    return "" if weights == "full" else f"of trainer, push and engine: {E4M3_RULE}"


def weights_fact(weights: WeightFormat) -> dict[str, str | int]:
    """Return what a numeric contract says of the format of weights: nothing with "full"."""
    return {"weights": E4M3_RULE} if weights == "e4m3" else {}
