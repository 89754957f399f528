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
WHOLE, SP = {"distributed_optimizer": False}, {"sequence_parallel": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    base = tmp_path_factory.mktemp("models")
    families = ("qwen3", "qwen2", "llama", "tied")
    return {family: str(write_model(base / family, family)) for family in families}


def num_unequal(found: Scored, case: ScoreCase, row_shards: int = 1) -> int:
    """How many log-probs are not those of an engine that sums in `row_shards` parts, bit for bit.

    Without `row_shards`, they are as many as the case asks for.
    """
    dtype = torch.bfloat16 if case.trainer.get("dtype") == "bfloat16" else torch.float32
    shards = max(row_shards, case.row_shards, case.split.get("tp", 1))
    expected = engine_scores(Path(case.model), make_batch(0), dtype, row_shards=shards)
    return int((found.scores != expected).sum())


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


def test_no_cut_changes_a_bit(models: dict[str, str], tmp_path: Path) -> None:
    """Against one rank's engine, whose sums have as many parts; its facts are the trainer's."""
    cases = {
        "pp 2": ScoreCase(models["qwen3"], {"pp": 2}, {}, SMALL),
        "pp 2, tied": ScoreCase(models["tied"], {"pp": 2}, WHOLE, BF16),
        "pp 2 with 2 chunks": ScoreCase(models["qwen3"], {"pp": 2}, {"chunks": 2}, SMALL),
        "dp 2, in 2 parts": ScoreCase(models["llama"], {"dp": 2}, {}, SMALL, row_shards=2),
        "tp 2": ScoreCase(models["qwen2"], {"tp": 2}, {}, SMALL),
        "tp 2, bfloat16": ScoreCase(models["tied"], {"tp": 2}, {}, BF16),
        "tp 2, sequence parallel": ScoreCase(models["qwen3"], {"tp": 2}, SP, SMALL),
        "cp 2": ScoreCase(models["llama"], {"cp": 2}, {}, SMALL),
        "cp 2, bfloat16": ScoreCase(models["qwen3"], {"cp": 2}, {}, BF16),
    }
    fsdp2 = {
        1: ScoreCase(models["qwen3"], {}, None, SMALL),
        2: ScoreCase(models["qwen3"], {}, None, SMALL, row_shards=2),
    }
    found = score_on(2, cases | {f"fsdp2, {n}": case for n, case in fsdp2.items()}, tmp_path)
    unequal = {name: num_unequal(found[name], case) for name, case in cases.items()}
    assert unequal == dict.fromkeys(cases, 0)
    assert found["pp 2"].contract == found["fsdp2, 1"].contract
    assert found["tp 2, sequence parallel"].contract == found["fsdp2, 2"].contract
    assert found["fsdp2, 1"].contract != found["fsdp2, 2"].contract
    assert torch.equal(found["tp 2, sequence parallel"].scores, found["fsdp2, 2"].scores)


def test_four_ranks_have_the_tree_of_their_contract(tmp_path: Path) -> None:
    """And a tree of another shape differs."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    model = str(write_model(tmp_path / "model", "qwen3", **heads))
    cases = {
        "tp 4": ScoreCase(model, {"tp": 4}, {}, SMALL),
        "tp 4, sequence parallel": ScoreCase(model, {"tp": 4}, SP, BF16),
        "tp 2 in 4 parts": ScoreCase(model, {"tp": 2, "dp": 2}, {}, SMALL, row_shards=4),
        "tp 2 x cp 2": ScoreCase(model, {"tp": 2, "cp": 2}, SP, SMALL),
        "tp 2 x pp 2": ScoreCase(model, {"tp": 2, "pp": 2}, SP, BF16),
        "cp 4": ScoreCase(model, {"cp": 4}, {}, SMALL),
    }
    found = score_on(4, cases, tmp_path)
    unequal = {name: num_unequal(found[name], case) for name, case in cases.items()}
    assert unequal == dict.fromkeys(cases, 0)
    assert num_unequal(found["tp 2 x cp 2"], cases["tp 2 x cp 2"], row_shards=4) > 50
    assert num_unequal(found["cp 4"], cases["cp 4"], row_shards=2) > 50
    assert torch.equal(found["tp 4"].scores, found["tp 2 in 4 parts"].scores)


def test_ranks_that_outnumber_heads_follow_another_contract(
    models: dict[str, str], tmp_path: Path
) -> None:
    """They have Megatron-core's own sums, and say so."""
    case = ScoreCase(models["llama"], {"tp": 4}, {}, SMALL)
    found = score_on(4, {"own": case, "fsdp2": ScoreCase(models["llama"], {}, None)}, tmp_path)
    assert num_unequal(found["own"], case) > 50
    expected = found["fsdp2"].contract
    assert "network" in disagreement({"trainer": found["own"].contract, "engine": expected})
