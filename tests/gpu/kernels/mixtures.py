"""Mixtures of experts on a GPU, of tiny and of real shapes, with random weights in bf16."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from spmd_rl.kernels import linear_fp32
from spmd_rl.kernels.moe.router import ExpertRoutes
from spmd_rl.model.layers.moe import Moe
from spmd_rl.model.layers.moe_module import MoeMlp
from spmd_rl.model.layers.sigmoid_router import SigmoidRouter
from spmd_rl.model.linear import Linear
from spmd_rl.model.lora import LoraConfig


class Sizes(NamedTuple):
    hidden: int
    experts: int
    chosen: int
    inner: int
    shared: int = 0
    sigmoid: SigmoidRouter | None = None


SIZES = {
    "tiny": Sizes(64, 8, 2, 48),
    "uneven": Sizes(72, 5, 3, 40),
    "30B-A3B": Sizes(2048, 128, 8, 768),
    "GLM-4.5-Air": Sizes(4096, 128, 8, 1408, 1408, SigmoidRouter(scale=1.5)),
    "groups": Sizes(64, 16, 4, 48, 32, SigmoidRouter(4, 2, 2.5)),
}


def mixture(name: str, *, normalizes: bool = True, rank: int = 0) -> MoeMlp:
    """Return a layer whose products have about the size of their inputs."""
    with torch.device("meta"):
        hidden, experts, chosen, inner, shared, sigmoid = SIZES[name]
        module = Moe(hidden, experts, chosen, inner, normalizes, shared, sigmoid).module(0)
        assert isinstance(module, MoeMlp)
        for expert in module.experts if rank else ():
            for layer in expert.children():
                assert isinstance(layer, Linear)
                layer.adapt(rank, LoraConfig(rank=rank).scale)
        module = module.to(torch.bfloat16)
    module = module.to_empty(device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    for parameter in module.parameters():
        scale = parameter.shape[-1] ** -0.5
        nn.init.normal_(parameter, std=scale, generator=generator)
    return module


def routes_of(module: MoeMlp, x: Tensor) -> ExpertRoutes:
    return module.routes_at_once(linear_fp32(x, module.gate.weight))


def one_by_one(module: MoeMlp, x: Tensor) -> Tensor:
    """Return what the layer gives where one expert follows the other: the oracle of bits."""
    return module.one_by_one(x, routes_of(module, x))
