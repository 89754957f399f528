"""Parameters in one slab: where they are, and that packed ones stay next to each other."""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_rl.model.hf import random_weights
from spmd_rl.model.network import CausalLM
from spmd_rl.model.slab_parameters import ALIGN_BYTES, fill_slab
from tests.specs import attention_of
from tests.unit.model.test_lora import SPEC


def in_slab(packed: bool) -> tuple[CausalLM, list[Tensor]]:
    slabs: list[Tensor] = []

    def allocate(num_bytes: int) -> Tensor:
        # as a slab that is not at the begin of its tensor
        slabs.append(torch.zeros(ALIGN_BYTES + num_bytes, dtype=torch.uint8)[ALIGN_BYTES:])
        return slabs[-1]

    with torch.device("meta"):
        model = CausalLM(SPEC).requires_grad_(False)
        if packed:
            model.pack_projections()
    fill_slab(model, allocate)
    return model, slabs


def test_all_parameters_are_in_one_slab_and_do_not_overlap() -> None:
    model, (slab,) = in_slab(packed=False)
    weights = dict(random_weights(SPEC, 0))
    for name, parameter in model.named_parameters():
        assert slab.data_ptr() <= parameter.data_ptr()
        assert parameter.data_ptr() + parameter.nbytes <= slab.data_ptr() + slab.nbytes
        assert (parameter.data_ptr() - slab.data_ptr()) % ALIGN_BYTES == 0
        assert not parameter.requires_grad
        parameter.copy_(weights[name])
    assert all(torch.equal(one, weights[name]) for name, one in model.named_parameters())
    slab.zero_()
    assert not any(one.any() for one in model.parameters()), "it is their memory"


def test_packed_projections_stay_together() -> None:
    """So that packing them again, as an engine does, leaves them in the slab."""
    model, (slab,) = in_slab(packed=True)
    weights = dict(random_weights(SPEC, 0))
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])
    assert all(torch.equal(one, weights[name]) for name, one in model.named_parameters())
    before = {name: one.data_ptr() for name, one in model.named_parameters()}
    model.pack_projections()
    assert {name: one.data_ptr() for name, one in model.named_parameters()} == before
    model.fuse_projections()
    attention = model.model.layers[1].self_attn
    assert attention.joined is not None
    queries = attention.joined.weight[: attention_of(SPEC).width]
    assert torch.equal(queries, weights["model.layers.1.self_attn.q_proj.weight"])
    slab.zero_()
    assert not attention.joined.weight.any()
