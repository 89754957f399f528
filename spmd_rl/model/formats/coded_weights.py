"""Weights of a model that are in few bits with `weights` as a format, and their names in a push.

They are the matrices of the blocks, experts' included, but for routers and gates of states. A push
gives the codes the name of the weight, and the scales the name that Hugging Face folders use. No
torch.
"""

from __future__ import annotations

from collections import Counter

from spmd_rl.model.formats import FORMATS, WeightFormat
from spmd_rl.model.layers.layer import TensorSpec
from spmd_rl.model.spec import ModelSpec, block_prefix


def scale_name(weight: str) -> str:
    """Return the name of the scales of a weight."""
    return f"{weight}_scale_inv"


def is_coded(tensor: TensorSpec) -> bool:
    """Return whether a parameter of a block can be in few bits."""
    return len(tensor.shape) == 2 and not tensor.stays_full


def coded_shapes(spec: ModelSpec, weights: WeightFormat) -> dict[str, tuple[int, int]]:
    """Return the shapes of the weights that are in few bits, by name: none with "full"."""
    if weights == "full":
        return {}
    return {
        block_prefix(number) + tensor.name: (tensor.shape[0], tensor.shape[1])
        for number, block in enumerate(spec.blocks)
        for tensor in block.parameters()
        if is_coded(tensor)
    }


def coded_sizes(
    spec: ModelSpec, weights: WeightFormat, ep: int = 1, *, experts_alone: bool = False
) -> tuple[int, int]:
    """Return how many elements of a rank's weights are in few bits where `ep` ranks share experts,
    and how many bytes their codes and scales take.
    """
    if weights == "full":
        return 0, 0
    num_elements = num_bytes = 0
    for block, count in Counter(spec.blocks).items():
        for tensor in filter(is_coded, block.parameters()):
            if experts_alone and tensor.expert is None:
                continue
            shared = ep if tensor.expert is not None else 1
            num_elements += count * tensor.num_elements // shared
            num_bytes += count * FORMATS[weights].num_bytes(tensor.shape) // shared
    return num_elements, num_bytes


def weights_sentence(weights: WeightFormat) -> str:
    """Return what to say of the format of weights, in a plan and at the start of a run."""
    return "" if weights == "full" else f"of trainer, push and engine: {FORMATS[weights].rule}"


def format_of(fact: str) -> WeightFormat:
    """Return the format of weights that a numeric contract says; "full" for an empty text."""
    return next((name for name, one in FORMATS.items() if one.rule == fact), "full")


def weights_fact(weights: WeightFormat) -> dict[str, str | int]:
    """Return what a numeric contract says of the format of weights: nothing with "full"."""
    return {} if weights == "full" else {"weights": FORMATS[weights].rule}
