"""The Megatron-core backend on GPUs, in bfloat16 with both layer specs, beside FSDP2 on one."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.backends.megatron_case import make_batch, write_model
from tests.dist.torchrun import torchrun

pytestmark = pytest.mark.skipif(
    find_spec("megatron") is None, reason="pip install -e '.[megatron]'"
)

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
SP = {"sequence_parallel": True}
ENGINE = {"layers": "transformer_engine"}
MIXTURE = "qwen3_moe"
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


class Case(NamedTuple):
    backend: dict[str, Any] | None  # None: FSDP2
    num_ranks: int = 1
    split: dict[str, int] = {}  # noqa: RUF012 - nobody changes it
    family: str = "qwen3"
    row_shards: int = 1


CASES = {
    "fsdp2": Case(None),
    "experts, fsdp2": Case(None, family=MIXTURE),
    "local": Case({}),
    "in 2 parts": Case({}, row_shards=2),
    "whole optimizer": Case({"distributed_optimizer": False}),
    "moments on the host": Case({"offload": "moments"}),
    "engine": Case(ENGINE),
    "tp 2": Case(SP, 2, {"tp": 2}),
    "pp 2": Case({}, 2, {"pp": 2}),
    "cp 2": Case({}, 2, {"cp": 2}),
    "dp 2": Case({}, 2, {"dp": 2}),
    "tp 2 x pp 2": Case(SP, 4, {"tp": 2, "pp": 2}),
    "engine, tp 2": Case(SP | ENGINE, 2, {"tp": 2}),
    "engine, pp 2": Case(ENGINE, 2, {"pp": 2}),
    "engine, cp 2": Case(ENGINE, 2, {"cp": 2}),
    "engine, tp 2 x pp 2": Case(SP | ENGINE, 4, {"tp": 2, "pp": 2}),
    "experts": Case({}, family=MIXTURE),
    "experts, engine": Case(ENGINE, family=MIXTURE),
    "experts, ep 2": Case({}, 2, {"ep": 2}, MIXTURE),
    "experts, engine, ep 2": Case(ENGINE, 2, {"ep": 2}, MIXTURE),
}
REFERENCES = {"qwen3": "fsdp2", MIXTURE: "experts, fsdp2"}
Found = tuple[dict[str, Any], dict[str, dict[str, Tensor]]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Found]:
    """Return the report of two steps of a case, and its tensors by kind and name."""
    work = tmp_path_factory.mktemp("megatron")
    models = {
        "qwen3": write_model(work / "model", "qwen3", std=0.04, **SIZES),
        MIXTURE: write_model(work / "mixture", MIXTURE, std=0.04, **SIZES, **EXPERTS),
    }

    @cache
    def found(name: str) -> Found:
        case = CASES[name]
        trainer = {"lr": 1e-4, "max_tokens": 400, "dtype": "bfloat16"}
        settings = {"split": case.split, "trainer": trainer, "seeds": [0, 1]}
        settings |= {"model": str(models[case.family]), "row_shards": case.row_shards}
        if case.backend is not None:
            settings["backend"] = case.backend
        file, out = work / "case.json", work / "out.json"
        file.write_text(json.dumps(settings))
        report = torchrun(
            "megatron_ranks.py", case.num_ranks, out, str(file), str(out), room="backends"
        )
        kinds: dict[str, dict[str, Tensor]] = {}
        for key, tensor in load_file(out.with_suffix(".safetensors")).items():
            kind, _, rest = key.partition("/")
            kinds.setdefault(kind, {})[rest] = tensor
        return report, kinds

    return found


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.backend is not None])
def test_steps_are_close_to_those_of_fsdp2(run: Callable[[str], Found], name: str) -> None:
    if "engine" in name and find_spec("transformer_engine") is None:
        pytest.skip("transformer-engine is not installed: pip install -e '.[te]'")
    (report, tensors), (expected, expected_tensors) = run(name), run(REFERENCES[CASES[name].family])
    mask = torch.from_numpy(make_batch(0).mask)
    own, other = (torch.tensor(one["scores"][0])[mask] for one in (report, expected))
    difference = (own - other).abs()
    print(f"{name}: abs(dlogp) mean {difference.mean():.2e} max {difference.max():.2e}", end=" ")
    print(f"unequal {int((own != other).sum())} of {len(own)}")
    assert float(difference.mean()) < 0.01
    for step, expected_step in zip(report["steps"], expected["steps"], strict=True):
        norm = expected_step["train/grad_norm"]
        assert step["train/grad_norm"] == pytest.approx(norm, rel=0.03)
    start, end, ends = tensors["start"], tensors["weights"], expected_tensors["weights"]
    moved = sum(float((end[key] - start[key]).norm()) ** 2 for key in start) ** 0.5
    apart = sum(float((end[key] - ends[key]).norm()) ** 2 for key in start) ** 0.5
    assert moved > 0 and apart < 0.5 * moved


@pytest.mark.parametrize(
    ("cut", "whole"), [("tp 2", "in 2 parts"), ("cp 2", "local"), ("pp 2", "local")]
)
def test_cuts_of_local_layers_change_no_log_prob(
    run: Callable[[str], Found], cut: str, whole: str
) -> None:
    """Against one rank with as many parts of sums; other parts are the negative control."""
    found, expected = (run(name)[0]["scores"][0] for name in (cut, whole))
    assert found == expected
    assert run("local")[0]["scores"][0] != run("in 2 parts")[0]["scores"][0]
