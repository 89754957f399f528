"""Where a Megatron trainer has the native engine's bits, and how far it is from them elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spmd_rl.controller.contracts import disagreement
from tests.backends.engine_scores import engine_scores
from tests.backends.megatron_case import make_batch, write_model
from tests.backends.score_cases import ScoreCase, Scored, score_on

pytestmark = [pytest.mark.dist, pytest.mark.backends]
pytest.importorskip("megatron.core", reason="make test-backends installs megatron-core")

RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
SMALL, BF16 = {"max_tokens": 60}, {"dtype": "bfloat16", "max_tokens": 60}
WHOLE = {"distributed_optimizer": False}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    base = tmp_path_factory.mktemp("models")
    families = ("qwen3", "qwen2", "llama", "tied")
    return {family: str(write_model(base / family, family)) for family in families}


def num_unequal(found: Scored, case: ScoreCase) -> int:
    """How many log-probs are not the engine's, bit for bit."""
    dtype = torch.bfloat16 if case.trainer.get("dtype") == "bfloat16" else torch.float32
    return int((found.scores != engine_scores(Path(case.model), make_batch(0), dtype)).sum())


def test_one_rank_has_the_engines_bits_and_contract(models: dict[str, str], tmp_path: Path) -> None:
    """Of every family, in both dtypes, and with one wrong op as the control."""
    right = {family: ScoreCase(model, trainer=SMALL) for family, model in models.items()}
    right["bfloat16"] = ScoreCase(models["qwen3"], trainer=BF16)
    right["recomputed"] = ScoreCase(
        models["qwen3"], backend={"model_options": RECOMPUTE}, trainer=SMALL
    )
    wrong = {
        "SiLU": ScoreCase(models["qwen3"], trainer=SMALL, plant="library SiLU"),
        "products": ScoreCase(models["qwen3"], trainer=SMALL, plant="K in halves"),
    }
    fsdp2 = {
        "fsdp2": ScoreCase(models["qwen3"], backend=None, trainer=SMALL),
        "fsdp2, bfloat16": ScoreCase(models["qwen3"], backend=None, trainer=BF16),
    }
    found = score_on(1, right | wrong | fsdp2, tmp_path)
    assert {name: num_unequal(found[name], case) for name, case in right.items()} == dict.fromkeys(
        right, 0
    )
    assert all(num_unequal(found[name], case) > 50 for name, case in wrong.items())
    for ours, theirs in {"qwen3": "fsdp2", "bfloat16": "fsdp2, bfloat16"}.items():
        assert found[ours].contract == found[theirs].contract


def test_a_pipeline_and_more_data_change_no_bit_and_other_cuts_do(
    models: dict[str, str], tmp_path: Path
) -> None:
    cases = {
        "pp 2": ScoreCase(models["qwen2"], {"pp": 2}, {}, SMALL),
        "pp 2, tied": ScoreCase(models["tied"], {"pp": 2}, WHOLE, BF16),
        "pp 2 with 2 chunks": ScoreCase(models["qwen3"], {"pp": 2}, {"chunks": 2}, SMALL),
        "dp 2": ScoreCase(models["llama"], {"dp": 2}, {}, SMALL),
        "tp 2": ScoreCase(models["qwen3"], {"tp": 2}, {}, SMALL),
        "tp 2, sequence parallel": ScoreCase(
            models["qwen3"], {"tp": 2}, {"sequence_parallel": True}, SMALL
        ),
        "cp 2": ScoreCase(models["llama"], {"cp": 2}, {}, SMALL),
        "fsdp2": ScoreCase(models["qwen3"], {}, None, SMALL),
    }
    found = score_on(2, cases, tmp_path)
    expected = found.pop("fsdp2").contract
    unequal = {name: num_unequal(found[name], cases[name]) for name in found}
    exact = [name for name, count in unequal.items() if count == 0]
    assert exact == ["pp 2", "pp 2, tied", "pp 2 with 2 chunks", "dp 2"]
    for name, one in found.items():
        is_equal = "network" not in disagreement({"trainer": one.contract, "engine": expected})
        assert is_equal == (name in exact), name


def test_what_stands_between_a_cut_model_and_the_engines_bits(tmp_path: Path) -> None:
    """Attention along cp; along tp, cut sums and the head. With the contract's, bits are equal."""
    sizes = {"head_dim": 16, "vocab_size": 52, "hidden_size": 64, "intermediate_size": 96}
    model = str(write_model(tmp_path / "model", "qwen3", **sizes))
    cut = {"cp 2": {"cp": 2}, "tp 2": {"tp": 2}}
    steps = {
        "cp 2": (None, "whole attention"),
        "tp 2": (None, "whole products", "whole products and vocabulary"),
    }
    cases = {
        f"{layout}, {plant}": ScoreCase(model, cut[layout], {}, SMALL, plant)
        for layout, plants in steps.items()
        for plant in plants
    }
    found = score_on(2, cases, tmp_path)
    unequal = {name: num_unequal(found[name], case) for name, case in cases.items()}
    for layout, plants in steps.items():
        counts = [unequal[f"{layout}, {plant}"] for plant in plants]
        assert counts[-1] == 0 and all(count > 0 for count in counts[:-1]), unequal
