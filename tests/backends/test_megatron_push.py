"""A push from a trainer of Megatron-core: shard to shard, as many boxes, and nothing in between."""

from __future__ import annotations

from typing import Any

import pytest

from tests.backends.megatron_case import write_model
from tests.dist.torchrun import torchrun

pytestmark = [pytest.mark.dist, pytest.mark.backends]
pytest.importorskip("megatron.core", reason="make test-backends installs megatron-core")

TRAINERS, BOTH, ENGINE = range(4), 3, 4  # rank 3 trains and generates


@pytest.fixture(scope="module")
def by_dtype(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    work = tmp_path_factory.mktemp("push")
    model = write_model(work / "model", "qwen3", num_attention_heads=8, num_key_value_heads=4)
    out = work / "out.json"
    return torchrun("push_ranks.py", 5, out, str(model), str(out), room="backends")


@pytest.fixture(params=["float32", "bfloat16"])
def ranks(
    request: pytest.FixtureRequest, by_dtype: dict[str, list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """What each rank reports, of a push to engines of this dtype."""
    return by_dtype[request.param]


def test_engines_hold_the_trainer_s_bytes_after_each_push(ranks: list[dict[str, Any]]) -> None:
    for rank in (BOTH, ENGINE):
        for push in ranks[rank]["pushes"]:
            assert push["unequal"] == []
            assert push["stale"] == [], "an engine that got nothing would show"
    assert len({one["plan"] for one in ranks}) == 1


def test_only_what_an_engine_lacks_is_moved(ranks: list[dict[str, Any]]) -> None:
    """The rank that trains too copies its own share, and gets the rest from the others."""
    whole, own = ranks[0]["whole_bytes"], ranks[BOTH]["held_bytes"]
    for number in range(2):
        pushes = [one["pushes"][number] for one in ranks]
        assert pushes[ENGINE]["received_bytes"] == whole
        assert (pushes[BOTH]["copied_bytes"], pushes[BOTH]["received_bytes"]) == (own, whole - own)
        assert sum(one["sent_bytes"] for one in pushes) == 2 * whole - own
        for rank in set(TRAINERS) - {BOTH}:
            assert pushes[rank]["received_bytes"] == pushes[rank]["copied_bytes"] == 0
            assert 0 < pushes[rank]["sent_bytes"] <= 2 * ranks[rank]["held_bytes"]


def test_no_rank_of_the_trainer_has_a_whole_model(ranks: list[dict[str, Any]]) -> None:
    """A push asks a rank for parts of its own boxes alone: about a quarter of the model."""
    whole = ranks[0]["whole_bytes"]
    for rank in TRAINERS:
        assert ranks[rank]["held_bytes"] < 0.3 * whole
        assert ranks[rank]["most_boxes_of_a_tensor"] == 1, "a rank's queries are one range"
        assert ranks[rank]["asked_beyond"] == []
        assert 0 < ranks[rank]["most_asked_bytes"] < 0.05 * whole
    assert sum(ranks[rank]["held_bytes"] for rank in TRAINERS) >= whole
