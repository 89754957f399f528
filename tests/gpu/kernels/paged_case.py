"""Data and paged sequences of tests/unit/kernels on a GPU, in bfloat16 by default."""

from __future__ import annotations

from functools import partial

import torch

from tests.unit.kernels import paged_case

ON_GPU = {"dtype": torch.bfloat16, "device": torch.device("cuda")}
qkv, Paged = partial(paged_case.qkv, **ON_GPU), partial(paged_case.Paged, **ON_GPU)
