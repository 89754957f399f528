"""The Megatron-core backend on one GPU, in bfloat16 with both layer specs, beside FSDP2."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.backends.megatron_case import make_batch, write_model
from tests.dist.torchrun import torchrun

pytestmark = pytest.mark.gpu
pytest.importorskip("megatron.core", reason="pip install 'spmd-rl[megatron]'")

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
BACKENDS: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "megatron": {"backend": {}},
    "whole optimizer": {"backend": {"distributed_optimizer": False}},
    "moments on the host": {"backend": {"offload": "moments"}},
    "transformer-engine": {"backend": {"layers": "transformer_engine"}},
}
NEEDS_ENGINE = pytest.mark.skipif(
    find_spec("transformer_engine") is None, reason="pip install 'spmd-rl[te]'"
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], Path]]:
    """Reports and tensors of two steps with each backend."""
    work = tmp_path_factory.mktemp("megatron")
    model = write_model(work / "model", "qwen3", std=0.04, **SIZES)
    reports = {}
    for name, backend in BACKENDS.items():
        if name == "transformer-engine" and find_spec("transformer_engine") is None:
            continue
        trainer = {"lr": 1e-4, "max_tokens": 400, "dtype": "bfloat16"}
        case = {"split": {}, "trainer": trainer, "model": str(model), "seeds": [0, 1], **backend}
        (work / "case.json").write_text(json.dumps(case))
        out = work / f"{name}.json"
        arguments = str(work / "case.json"), str(out)
        report = torchrun("megatron_ranks.py", 1, out, *arguments, room="backends")
        reports[name] = report, out.with_suffix(".safetensors")
    return reports


@pytest.mark.parametrize(
    "name",
    [
        "megatron",
        "whole optimizer",
        "moments on the host",
        pytest.param("transformer-engine", marks=NEEDS_ENGINE),
    ],
)
def test_steps_are_close_to_those_of_fsdp2(
    found: dict[str, tuple[dict[str, Any], Path]], name: str
) -> None:
    (report, tensors), (expected, expected_tensors) = found[name], found["fsdp2"]
    mask = torch.from_numpy(make_batch(0).mask)
    own, other = (torch.tensor(one["scores"][0])[mask] for one in (report, expected))
    difference = (own - other).abs()
    print(f"abs(dlogp) mean {difference.mean():.2e} max {difference.max():.2e}", end=" ")
    print(f"equal bits {(own == other).float().mean():.3f}")
    assert float(difference.mean()) < 0.01
    for step, expected_step in zip(report["steps"], expected["steps"], strict=True):
        norm = expected_step["train/grad_norm"]
        assert step["train/grad_norm"] == pytest.approx(norm, rel=0.03)
    start, end, ends = (
        {name.partition("/")[2]: one for name, one in load_file(file).items() if kind in name}
        for kind, file in (
            ("start/", tensors),
            ("weights/", tensors),
            ("weights/", expected_tensors),
        )
    )
    moved = sum(float((end[name] - start[name]).norm()) ** 2 for name in start) ** 0.5
    apart = sum(float((end[name] - ends[name]).norm()) ** 2 for name in start) ** 0.5
    assert 0 < apart < 0.5 * moved
