"""Kernels and choices that a second process finds on disk have the bits of those that the first
process made.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spmd_rl.kernels.runtime.versions import has_flash

pytestmark = pytest.mark.skipif(not has_flash(), reason="the kernels' packages are not installed")

PROGRAM = """
import hashlib, json
import cutlass.cute as cute
import numpy as np
import torch
from spmd_rl.kernels.attention.flash import PackedFlash, PagedFlash
from spmd_rl.kernels.attention.flash_decode import decode_attention
from spmd_rl.kernels.linear import cublas
from spmd_rl.kernels.linear.dispatch import matmul, own_matmul_into

made = {"compiled": 0, "raced": 0}

def counted(name, function):
    def call(*given, **named):
        made[name] += 1
        return function(*given, **named)
    return call

cute.compile = counted("compiled", cute.compile)
cublas.fastest = counted("raced", cublas.fastest)
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)

def random(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")

def whole(values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")

results = []
x, weight, out = random(16, 2560), random(9728, 2560), random(16, 9728)
own_matmul_into(out, x, weight, None)
results += [out, matmul(random(1024, 1024), random(4096, 1024), None, torch.bfloat16)]
q, k, v = (random(400, heads, 128).requires_grad_() for heads in (16, 8, 8))
attended = PackedFlash(np.array([100, 300]), q.device)(q, k, v)
attended.backward(random(400, 16, 128))
results += [attended, q.grad, k.grad, v.grad]
keys, values, pages = random(4, 128, 8, 128), random(4, 128, 8, 128), whole([[0, 1], [2, 3]])
for batch in (q.detach()[:2], q.detach()[:40]):
    count = len(batch)
    out, table = torch.empty_like(batch), pages.repeat(count // 2, 1)
    decode_attention(
        batch, keys, values, table, whole([100, 200] * (count // 2)), whole([0]), out
    )
    results.append(out)
bounds = whole([0, 20, 40])
results.append(PagedFlash(pages, whole([120, 220]), bounds, 40, 20)(q.detach()[:40], keys, values))
digest = hashlib.sha256()
for result in results:
    digest.update(result.detach().view(torch.int16).cpu().numpy().tobytes())
print(json.dumps(made | {"digest": digest.hexdigest()}))
"""


def made(folder: Path | str) -> dict[str, int | str]:
    environment = os.environ | {
        "SPMD_RL_CACHE_DIR": str(folder),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    command = [sys.executable, "-c", PROGRAM]
    text = subprocess.check_output(command, env=environment, text=True)
    found: dict[str, int | str] = json.loads(text.splitlines()[-1])
    return found


def test_a_second_process_compiles_nothing_and_has_equal_bits(tmp_path: Path) -> None:
    first, second = made(tmp_path / "cache"), made(tmp_path / "cache")
    # a product; attention packed, its gradient's three parts, paged, and twice for decoding
    assert int(first["compiled"]) >= 7
    assert first["raced"] == 1
    assert second == {"compiled": 0, "raced": 0, "digest": first["digest"]}
    (next((tmp_path / "cache").glob("flash_attn_fwd-*"))).unlink()
    third = made(tmp_path / "cache")
    assert third == {"compiled": 1, "raced": 0, "digest": first["digest"]}
