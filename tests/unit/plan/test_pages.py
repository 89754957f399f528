"""An engine's pages: what the ledger leaves, as the plan says and as the engine takes it."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shapes import config
from spmd_rl.config.load import load
from spmd_rl.errors import PlanError
from spmd_rl.mesh.split import RoleSplit, Split
from spmd_rl.offload.ledger import Ledger
from spmd_rl.plan.resolve import planned_settings, resolve
from spmd_rl.plan.text import lines
from spmd_rl.recipes import grpo, grpo_async, sft
from spmd_rl.rollout.native.auto_sizes import FREE_SHARE, auto_pages
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.train.config import TrainerConfig

GIB = 1 << 30
PAGE_BYTES = 128 * 2 * 28 * 8 * 128 * 2
LEAST = 40960 // 128 * PAGE_BYTES
DISJOINT = ("split.train.ranks=1", "split.infer.ranks=1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(config("0.6B")))
    return folder


def configured(model: Path, *words: str, recipe: Any = grpo) -> Any:
    return load(recipe.Config, None, [f"model={model}", "data=none.jsonl", *words])


def kv(ledger: Ledger) -> int:
    return sum(entry.num_bytes for entry in ledger.entries if entry.tag == "kv")


def reserved(cfg: Any, world_size: int, capacity: int | None = None) -> int:
    """What the plan tells the engine of a run."""
    return planned_settings(cfg, world_size, capacity)["infer"]["reserved_bytes"]


def taken(
    model: Path, cfg: NativeEngineConfig, free: int, capacity: int, reserved_bytes: int = 0
) -> int:
    """Bytes of the pages that an engine allocates on a GPU with so much memory left."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (free, capacity))
        spec = resolve(configured(model), 1).spec
        assert spec is not None
        cuda = torch.device("cuda")
        return auto_pages(spec, cfg, cuda, torch.bfloat16, 128, reserved_bytes) * PAGE_BYTES


@given(
    gib=st.floats(4, 200),
    max_batch=st.integers(1, 512),
    fraction=st.floats(0.3, 0.95),
    split=st.sampled_from([(), DISJOINT, ("split.train.ranks=0-0",), ("split.infer.ranks=1-1",)]),
    recipe=st.sampled_from([grpo, grpo_async]),
)
def test_all_that_is_counted_fits_and_the_engine_takes_what_is_planned(
    model: Path, gib: float, max_batch: int, fraction: float, split: tuple[str, ...], recipe: Any
) -> None:
    capacity = int(gib * GIB)
    words = (f"engine.max_batch={max_batch}", f"engine.memory_fraction={fraction}", *split)
    cfg = configured(model, *words, recipe=recipe)
    found = resolve(cfg, 2, capacity)
    pages = {kv(found.ledgers[rank]) for rank in found.placements.infer.ranks}
    assert len(pages) == 1, "all ranks of an engine take the same"
    assert pages == {taken(model, cfg.engine, capacity, capacity, reserved(cfg, 2, capacity))}
    if pages == {LEAST}:
        return
    for rank in found.placements.infer.ranks:
        ledger = found.ledgers[rank]
        for phase in ledger.phases:
            there = any(entry.tag == "kv" and entry.is_in(phase) for entry in ledger.entries)
            assert not there or ledger.resident_bytes(phase) <= fraction * capacity


def test_more_sequences_fit_in_8_bits(model: Path) -> None:
    """Codes of 28 layers and the numbers of one take 30/56 of the bytes."""
    words, codes = ("offload.sleep=always", "engine.max_batch=4096"), "cache=e4m3"
    plans = [
        resolve(configured(model, *words, *more), 1, 80 * GIB)
        for more in ((), (f"trainer.{codes}", f"engine.{codes}"))
    ]
    held = [one.queue.num_held for one in plans if one.queue]
    assert held[1] / held[0] == pytest.approx(56 / 30, rel=0.01)
    assert kv(plans[1].ledgers[0]) == pytest.approx(kv(plans[0].ledgers[0]), rel=0.001)
    said = [[line for line in lines(one) if line.startswith("cache ")] for one in plans]
    assert said[0] == [] and "e4m3 codes of keys and values" in said[1][0]


def test_pages_are_what_is_left(model: Path) -> None:
    """They fill 0.9 of the GPU, in the worst phase that they exist in, up to a part of a page."""
    cfg = configured(model, "offload.sleep=always")
    ledger = resolve(cfg, 1, 140 * GIB).ledgers[0]
    assert ledger.beside_bytes("kv") == ledger.resident_bytes("rollout") - kv(ledger)
    assert 0 <= 0.9 * 140 * GIB - ledger.beside_bytes("kv") - kv(ledger) < PAGE_BYTES


def test_one_context_is_taken_of_a_full_gpu_and_refused(model: Path) -> None:
    found = resolve(configured(model), 1, 6 * GIB)
    assert kv(found.ledgers[0]) == LEAST
    with pytest.raises(
        PlanError, match=r"phase eval needs .* \+ kv 4\.375 GiB \+ .* and there are 6\.000 GiB"
    ):
        found.require(6 * GIB)


def test_roles_that_overlap_leave_less(model: Path) -> None:
    """On shared ranks: while the trainer trains, the pages stay, and so does what a step computes
    in.
    """
    turns = resolve(configured(model, "offload.sleep=always"), 1, 140 * GIB).ledgers[0]
    overlapping = resolve(configured(model, recipe=grpo_async), 1, 140 * GIB).ledgers[0]
    assert overlapping.phases == ("run",)
    trainer = sum(entry.num_bytes for entry in overlapping.entries if entry.role == "train")
    assert kv(turns) - kv(overlapping) == pytest.approx(trainer, abs=PAGE_BYTES)
    apart = [
        resolve(configured(model, *DISJOINT, recipe=one), 2, 140 * GIB)
        for one in (grpo, grpo_async)
    ]
    assert kv(apart[0].ledgers[1]) == pytest.approx(kv(apart[1].ledgers[1]), abs=512 << 20)


def test_an_engine_that_finds_more_in_use_takes_less(model: Path) -> None:
    cfg = configured(model)
    beside = reserved(cfg, 1)
    room = 126 * GIB - beside

    def pages(free: int) -> int:
        return taken(model, cfg.engine, free, 140 * GIB, beside)

    assert room - pages(140 * GIB) < PAGE_BYTES
    assert room - pages(140 * GIB - beside) < PAGE_BYTES
    assert 0 <= 36 * GIB - pages(50 * GIB) < PAGE_BYTES, "90 are in use, of 126"


@pytest.mark.parametrize(
    ("fraction", "free", "left"), [(0.9, 140, 56), (0.9, 40, 16), (0.5, 90, 20), (0.9, 10, 0)]
)
def test_an_engine_that_nobody_counted_for_takes_a_share(
    model: Path, fraction: float, free: int, left: int
) -> None:
    """Of what is free, as long as all in use stays below the fraction, and at least one context."""
    assert FREE_SHARE == 0.4
    pages = taken(model, NativeEngineConfig(memory_fraction=fraction), free * GIB, 140 * GIB)
    assert 0 <= max(left * GIB, LEAST) - pages < PAGE_BYTES


def test_an_engine_without_room_for_one_context_says_so(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = resolve(configured(model), 1).spec
    assert spec is not None
    cuda = torch.device("cuda")
    for capacity, said in (10, "0 B"), (12, "1.800 GiB"):
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda device, size=capacity: (size * GIB, size * GIB)
        )
        sentence = (
            f"room for {said} of keys and values, and one context of 40960 tokens takes 4.375 GiB"
        )
        with pytest.warns(UserWarning, match=sentence):
            pages = auto_pages(spec, NativeEngineConfig(), cuda, torch.bfloat16, 128, 9 * GIB)
        assert pages * PAGE_BYTES == LEAST


def test_what_cannot_be_counted_adds_no_setting(model: Path) -> None:
    """Pages that are given; no engine, model, ranks or parts; and a role that the ledger does not
    know.
    """
    full = configured(model)
    cases = [
        configured(model, "engine.num_pages=7"),
        configured(model, recipe=sft),
        configured(model / "nothing"),
        replace(full, model=""),
        configured(model, "split.infer.ranks=2"),
        replace(full, split=dict.fromkeys(("train", "infer", "judge"), RoleSplit())),
        SimpleNamespace(split=Split(), model=str(model), trainer=TrainerConfig()),
        SimpleNamespace(**vars(full) | {"trainer": "none of ours"}),
        SimpleNamespace(**vars(full) | {"model": TrainerConfig()}),
    ]
    assert all(planned_settings(cfg, 1) == {} for cfg in cases)
    assert reserved(full, 1) > 0
    apart = replace(
        full, split={"train": RoleSplit("1"), "infer": RoleSplit("1"), "judge": RoleSplit("2-2")}
    )
    assert reserved(apart, 3) > 0
