"""The mismatch microscope on Megatron-core: it agrees with the engine, or the op is named."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from spmd_rl.cli import main
from spmd_rl.mesh.alone import alone
from spmd_rl.microscope.diagnose.faults import plant
from spmd_rl.microscope.examine import Examination, ReplaySetup, examine
from spmd_rl.microscope.replay.engine_pass import EnginePass
from spmd_rl.microscope.replay.forward_pass import ForwardPass, load_model
from spmd_rl.microscope.taps.points import OPS
from spmd_rl.model.hf import save_folder
from spmd_rl.model.read import read_spec
from spmd_rl.rollout.native.config import NativeEngineConfig
from tests.backends.engine_scores import CPU, case_of
from tests.backends.megatron_case import make_batch, write_model
from tests.dist.torchrun import ROOT

pytestmark = [
    pytest.mark.backends,
    pytest.mark.filterwarnings("ignore"),  # Megatron-core warns of what it lacks, at its import
]
pytest.importorskip("megatron.core", reason="make test-backends installs megatron-core")


def engine(folder: Path, fault: str | None = None) -> EnginePass:
    cfg = NativeEngineConfig(page_size=4, max_batch=16, max_step_tokens=40)
    found = EnginePass(load_model(folder, torch.float32, CPU), cfg)
    if fault is not None:
        plant(fault, found)
    return found


def introduced(found: Examination) -> Counter[str]:
    """How many points of each op introduce a difference."""
    results = found.comparison.results
    return Counter(one.point.op for one in results if one.status == "introduced")


def test_the_first_op_that_differs_is_named_on_either_side(tmp_path: Path) -> None:
    from spmd_rl.microscope.replay.backend_pass import MegatronPass
    from tests.backends.score_ranks import planted

    folder, case = write_model(tmp_path, "qwen3"), case_of(make_batch(0))

    def examined(left: ForwardPass, right: ForwardPass) -> Examination:
        return examine(ReplaySetup(case, left, right, str(folder)))

    with alone("train") as context:
        megatron = MegatronPass(folder, torch.float32, context, max_tokens=100)
        agreeing = examined(engine(folder), megatron)
        faulty_engine = examined(engine(folder, "split-k"), megatron)
        with planted("library SiLU"):
            faulty_megatron = examined(megatron, engine(folder))
    assert agreeing.agree
    assert {point.op for point in agreeing.comparison.points} == set(OPS)
    assert introduced(faulty_engine) == {"down_proj": 1}
    assert "layer 2 down_proj" in faulty_engine.verdict
    assert "K summed in 2 parts" in faulty_engine.verdict
    assert introduced(faulty_megatron).keys() == {"act"}
    first = faulty_megatron.comparison.first_introduced
    assert first is not None and str(first.point) == "layer 0 act"
    assert "There Megatron-core ran" in faulty_megatron.verdict
    assert "the library's SiLU, rounded, then the product" in faulty_megatron.verdict


def test_the_command_takes_it_as_a_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ROOT / "examples" / "arithmetic" / "model"
    model = load_random(folder, tmp_path / "hf")

    def mismatch(*words: str) -> int:
        command = ["spmd-rl", "mismatch", "--model", str(model), "--prompts", "15+29=", "7+8="]
        monkeypatch.setattr(sys, "argv", [*command, "--out", str(tmp_path / "out"), *words])
        return main.main()

    assert mismatch("--right", "megatron") == 0
    assert "engine and megatron agree in every bit" in capsys.readouterr().out
    assert mismatch("--right", "megatron", "--plant", "split-k") == 1
    assert "layer 1 down_proj" in capsys.readouterr().out
    assert (tmp_path / "out" / "engine-megatron.split-k.json").is_file()


def load_random(like: Path, target: Path) -> Path:
    """Write the example's model with random weights."""
    from spmd_rl.model.hf import random_weights

    save_folder(target, like, random_weights(read_spec(like), seed=1))
    return target
