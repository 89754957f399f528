"""No token is unequal under other settings of the trainer and of attention; with a fault in the
engine many are.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.grpo_proof import broken_promises
from tests.gpu.recipes.runs import ONE_GPU, new_run, proof, together, write_model
from tests.system.kill_resume import Run

pytestmark = pytest.mark.timeout(400)

SETTINGS = {
    "recomputed whole, in two optimizer steps": [
        "--trainer.backend.recompute=all",
        "--trainer.minibatches=2",
    ],
    "recomputed where cheap, attention in splits": [
        *(
            "--trainer.backend.recompute=cheap",
            "--trainer.attention_split=128",
            "--engine.attention_split=128",
        ),
    ],
}
BLOCKS = "heads of 80, which FlashAttention-4 does not take"
EXPERTS = "experts in place of MLPs"
MIXTURE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 144,
    "norm_topk_prob": True,
}
FAULTY = "one product of the engine sums K in two parts"


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Run]:
    found = {
        what: new_run(folder, f"r{n}", ONE_GPU["sync"], *more)
        for n, (what, more) in enumerate(SETTINGS.items())
    }
    own = [
        f"--model={write_model(folder / 'heads of 80', head_dim=80)}",
        "--trainer.deterministic=false",
    ]
    found[BLOCKS] = new_run(folder, "blocks", ONE_GPU["sync"], *own)
    mixture = f"--model={write_model(folder / 'experts', **MIXTURE)}"
    found[EXPERTS] = new_run(folder, "experts", ONE_GPU["sync"], mixture)
    found[FAULTY] = new_run(folder, "faulty", ["tests.gpu.recipes.faulty", "--nproc=1"])
    together({what: run.finish for what, run in found.items()})
    return found


@pytest.mark.parametrize("what", [*SETTINGS, BLOCKS, EXPERTS])
def test_no_token_is_unequal(runs: dict[str, Run], what: str) -> None:
    for compared, mismatched in proof(runs[what]):
        assert compared > 1000
        assert mismatched == 0


def test_our_own_attention_promises_equal_bits_too(runs: dict[str, Run]) -> None:
    assert broken_promises(runs[BLOCKS].folder) == []
    assert "keys in ascending blocks" in (runs[BLOCKS].folder / "contract.json").read_text()


@pytest.mark.parametrize(
    ("words", "code", "said", "kept"),
    [
        ([], 0, "agree in every bit", "engine-trainer"),
        (["--plant=split-k"], 1, "K summed in 2 parts", "engine-trainer.split-k"),
        (["--right=transformers"], 1, "transformers ran", "engine-transformers"),
    ],
)
def test_the_microscope_replays_a_run(
    runs: dict[str, Run], words: list[str], code: int, said: str, kept: str
) -> None:
    run = runs["recomputed where cheap, attention in splits"]
    command = [*run.command[:-1], "mismatch", str(run.folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == code, done.stderr
    assert said in done.stdout
    found = json.loads((run.folder / "mismatch" / f"{kept}.json").read_text())
    assert found["agree"] is (code == 0)
    assert "flash-attn-4" in found["versions"]["attention"]
    assert found["versions"]["attention_split"] == "128"


def test_control_a_fault_in_the_engine_is_counted(runs: dict[str, Run]) -> None:
    for compared, mismatched in proof(runs[FAULTY]):
        assert compared > 1000
        assert mismatched > 10
