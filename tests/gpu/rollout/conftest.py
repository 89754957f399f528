"""What the tests of the engine's graphs share: the model, and the samples that every schedule must
give.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spmd_rl.kernels.attention.flash import flash_supports
from spmd_rl.model.network import CausalLM
from tests.gpu.rollout.graph_case import DEVICE, SPEC, USUAL, new_engine, new_model, workload
from tests.samples import Samples, finish
from tests.specs import attention_of


@pytest.fixture(autouse=True)
def _needs_flash() -> None:
    if not flash_supports(attention_of(SPEC).head_dim, torch.bfloat16, DEVICE):
        pytest.skip("needs FlashAttention-4 on a Hopper GPU")


@pytest.fixture(scope="session")
def model() -> CausalLM:
    return new_model()


@pytest.fixture(scope="session")
def alone(model: CausalLM) -> Samples:
    """Every sample decoded step by step, in batches of two."""
    return finish(new_engine(model, replace(USUAL, cuda_graphs=False, max_batch=2)), workload())
