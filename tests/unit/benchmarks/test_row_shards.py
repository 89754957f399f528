"""Sums in parts that one model is switched to, beside those of a model that was built with them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.row_shards import sum_in_parts
from benchmarks.shapes import TINY, random_weights
from benchmarks.training import spec_of
from spmd_rl.kernels import PackedAttention
from spmd_rl.model.hf import fill
from spmd_rl.model.network import CausalLM
from spmd_rl.model.parts.part import ROW_SHARDS
from spmd_rl.model.spec import ModelSpec

LENGTH = 24


def built(spec: ModelSpec) -> CausalLM:
    model = CausalLM(spec)
    with torch.no_grad():
        fill(model, random_weights(spec))
    return model


def hidden(model: CausalLM) -> Tensor:
    attend = PackedAttention(np.array([LENGTH], np.int32), device=torch.device("cpu"))
    positions = torch.arange(LENGTH)
    with torch.no_grad():
        return model(7 * positions + 1, positions, attend)


def test_a_model_that_is_switched_sums_as_one_that_is_built_so() -> None:
    spec = spec_of(TINY)
    switched, found = built(spec), {}
    for row_shards in (*ROW_SHARDS[::-1], *ROW_SHARDS):
        sum_in_parts(switched, spec, row_shards)
        found[row_shards] = hidden(switched)
        assert torch.equal(found[row_shards], hidden(built(replace(spec, row_shards=row_shards))))
    assert not any(torch.equal(found[1], found[row_shards]) for row_shards in ROW_SHARDS[1:])
