"""Two paths over a tiny model: they agree, or the microscope finds the op at which they do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from spmd_rl.errors import ConfigError
from spmd_rl.kernels.linear.cpu import rows_are_independent
from spmd_rl.microscope.diagnose.compare import Comparison, compare
from spmd_rl.microscope.diagnose.explain import VariantSearch
from spmd_rl.microscope.diagnose.faults import plant
from spmd_rl.microscope.page.verdict import verdict
from spmd_rl.microscope.replay.case import ReplayCase, ReplaySequence
from spmd_rl.microscope.replay.engine_pass import EnginePass
from spmd_rl.microscope.replay.forward_pass import ForwardPass
from spmd_rl.microscope.replay.split_reference import merged_attention
from spmd_rl.microscope.taps.points import OPS, Point
from spmd_rl.microscope.taps.taps import HashTap, ProfilerTap, Tap, ValueTap
from spmd_rl.model.read import read_spec
from spmd_rl.rollout.native.config import NativeEngineConfig

MIDDLE = 1  # of three layers


def kinds(comparison) -> Counter[str]:
    """How many points of each op introduce a difference."""
    return Counter(one.point.op for one in comparison.results if one.status == "introduced")


def test_engine_and_trainer_agree_in_every_op(engine, trainer, case) -> None:
    path = engine()
    comparison = compare(path, trainer, case)
    assert comparison.results == ()
    assert comparison.first_introduced is None
    assert {point.op for point in comparison.points} == set(OPS) - {"router", "routes", "experts"}
    assert len(comparison.points) == 1 + 3 * 14 + 3
    hits = path.facts["tokens from the prefix cache"]
    assert hits == 32
    every = (sum(len(one.tokens) - 1 for one in case.sequences) - hits) * (1 + 3 * 14 + 1)
    assert comparison.num_compared_rows == every + 2 * sum(
        len(one.response) for one in case.sequences
    )
    assert "agree in every bit" in verdict(comparison, case, ("engine", "trainer"))


def test_whatever_the_engine_goes_through_changes_no_bit(engine, trainer) -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(2, 100, 39)
    case = ReplayCase(
        tuple(ReplaySequence(f"0:{n}", prompt, rng.integers(2, 100, 40)) for n in range(6))
    )
    path = engine()
    path.cfg = replace(path.cfg, num_pages=50)
    comparison = compare(path, trainer, case)
    assert comparison.results == ()
    assert comparison.problems == ()
    for what in ("preemptions", "tokens from the prefix cache", "cut prompts"):
        assert path.facts[what] > 0, what


def test_a_cache_that_gives_somebody_elses_keys_is_called_that(
    engine, trainer, case, monkeypatch
) -> None:
    def careless(keys: list[bytes], root: bytes, tokens: np.ndarray, page_size: int) -> None:
        keys.extend(bytes([page]) for page in range(len(keys), len(tokens) // page_size))

    monkeypatch.setattr("spmd_rl.rollout.native.prefix_sharing.extend_keys", careless)
    rng = np.random.default_rng(1)
    case = ReplayCase(
        tuple(
            ReplaySequence(f"{n}:0", rng.integers(2, 100, 9), rng.integers(2, 100, 5))
            for n in range(2)
        )
    )
    comparison = compare(engine(), trainer, case)
    said = verdict(comparison, case, ("engine", "trainer")).splitlines()
    assert (
        said[0] == "At position 0, 1:0 reads position 0 of 0:0 in the cache: not its own history."
    )
    assert said[1].startswith("layer 0 attention: ")


FOUND = {
    "split-k": (Point(MIDDLE, "down_proj"), {"down_proj": 1}),
    "norm-order": (Point(MIDDLE, "post_norm"), {"post_norm": 1}),
    "rope-bf16": (Point(0, "q"), {"q": 3, "k": 3}),
    "logits-bf16": (Point(3, "logits"), {"logits": 1}),
    "auto-splits": (Point(0, "attention"), {"attention": 3}),
    "library-logprob": (Point(3, "logprob"), {"logprob": 1}),
}


@pytest.fixture(scope="module")
def faulty(engine, trainer, case) -> Callable[[str], tuple[EnginePass, Comparison]]:
    """An engine with that fault, and how it compares with the trainer."""

    @cache
    def found(fault: str) -> tuple[EnginePass, Comparison]:
        path = engine()
        plant(fault, path)
        return path, compare(path, trainer, case)

    return found


@pytest.mark.parametrize("fault", FOUND)
def test_a_planted_fault_is_found_where_it_is_and_only_there(faulty, case, fault: str) -> None:
    _, comparison = faulty(fault)
    point, introducing = FOUND[fault]
    assert comparison.first_introduced is not None
    assert comparison.first_introduced.point == point
    assert kinds(comparison) == introducing
    for one in comparison.results:
        if one.point.order < point.order:
            assert one.status == "equal", str(one.point)
        if one.point.op == "logprob" and fault != "library-logprob":
            assert one.status == "inherited"
    assert comparison.first_introduced.same_input.unequal
    sentence = verdict(comparison, case, ("engine", "trainer"))
    assert sentence.startswith(f"{point}: ")
    assert "introduced here" in sentence


def test_a_harmless_change_is_not_called_a_fault(engine, trainer, case) -> None:
    """The row tile makes the library's product exact on the CPU, where it gives each tile its own
    bits.
    """
    path = engine()
    width, depth = path.model.model.layers[MIDDLE].mlp.down_proj.weight.shape
    if not rows_are_independent(width, depth, False, torch.float32, torch.get_num_threads()):
        pytest.skip("this CPU's library does not give each tile of rows its own bits")
    plant("library-linear", path)
    assert compare(path, trainer, case).results == ()


def test_splits_begin_where_there_are_two_blocks_of_keys(faulty, case) -> None:
    first = faulty("auto-splits")[1].first_introduced
    assert first is not None
    assert {case.locate(row)[0] for row in first.differing_rows} == {"1:0"}
    assert all(case.locate(row)[1] >= 2 * 64 - 1 for row in first.differing_rows)


def test_one_split_is_the_plain_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*size, 8, generator=generator) for size in ((4,), (90, 2), (90, 2)))
    scores = torch.einsum("kgd,skd->kgs", q.view(2, 2, 8), k) * 8**-0.5
    expected = torch.einsum("kgs,skd->kgd", scores.softmax(-1), v).reshape(4, 8)
    for splits in (1, 2, 5):
        torch.testing.assert_close(merged_attention(q, k, v, splits), expected)


def test_automatic_splits_are_not_planted_beside_splits_of_one_size(engine) -> None:
    path = EnginePass(engine().model, NativeEngineConfig(attention_split=128))
    with pytest.raises(ConfigError, match="attention_split = 0, but here it is 128"):
        plant("auto-splits", path)


def test_an_unknown_fault_is_refused(engine) -> None:
    with pytest.raises(ConfigError, match="there is no fault 'x'"):
        plant("x", engine())


@pytest.mark.parametrize("left", ["engine", "trainer"])
def test_the_difference_from_transformers_is_explained(
    engine, trainer, reference, case, left: str
) -> None:
    path = engine() if left == "engine" else trainer
    comparison = compare(path, reference, case)
    assert comparison.first_introduced is not None
    # their products of rows that fill no tile have other bits on some CPUs
    assert comparison.first_introduced.point in {
        Point(0, op) for op in ("q_proj", "k_proj", "v_proj", "attention")
    }
    found = kinds(comparison)
    # their attention is another kernel and their SiLU another exponential; norms and RoPE agree
    assert found["attention"] == 3
    assert found["act"] == 3
    assert not set(found) & {"embed", "input_norm", "q", "k", "v", "post_norm", "final_norm"}
    assert all(one.largest_difference < 1e-3 for one in comparison.results)


class Meddling(Tap):
    """Changes one element on its way."""

    def __init__(self, inner: Tap, point: Point, row: int) -> None:
        self.inner, self.point, self.row = inner, point, row

    def record(
        self, point: Point, x: torch.Tensor, rows: torch.Tensor, locations: torch.Tensor | None
    ) -> torch.Tensor:
        hit = (rows == self.row).nonzero()[:, 0]
        if point == self.point and len(hit):
            x = x.clone()
            x[hit[0]] += 1
        return self.inner.record(point, x, rows, locations)

    def fill_shared_rows(self, rows: torch.Tensor, sources: torch.Tensor) -> None:
        self.inner.fill_shared_rows(rows, sources)


class Wrong(ForwardPass):
    """An engine whose op at `point` is wrong in one row."""

    name, rows_are_distinct = EnginePass.name, False

    def __init__(self, engine: EnginePass, point: Point, row: int) -> None:
        super().__init__(engine.device, engine.dtype)
        self.engine, self.point, self.row = engine, point, row

    def run(self, case: ReplayCase, tap: Tap) -> None:
        self.engine.run(case, Meddling(tap, self.point, self.row))


@pytest.mark.parametrize(
    "op",
    [
        op
        for op in OPS
        if op not in ("embed", "final_norm", "logits", "logprob", "router", "routes", "experts")
    ],
)
def test_a_wrong_element_is_found_at_any_op_of_any_row(engine, trainer, case, op: str) -> None:
    few = ReplayCase(case.sequences[:2])
    row = int(few.offsets[1]) + 11  # decoded
    comparison = compare(Wrong(engine(), Point(2, op), row), trainer, few)
    assert comparison.first_introduced is not None
    assert comparison.first_introduced.point == Point(2, op)
    assert comparison.first_introduced.differing_rows == (row,)
    assert kinds(comparison) == {op: 1}


class Racing(Wrong):
    """Wrong in its first run only."""

    def run(self, case: ReplayCase, tap: Tap) -> None:
        if isinstance(tap, HashTap):
            super().run(case, tap)
        else:
            self.engine.run(case, tap)


def test_what_is_wrong_only_once_is_said_to_be_that(engine, trainer, case) -> None:
    few, point = ReplayCase(case.sequences[:2]), Point(1, "o_proj")
    comparison = compare(Racing(engine(), point, 5), trainer, few)
    assert comparison.unequal_points[0] == (point, 1)
    assert comparison.first_introduced is None
    assert not comparison.agree
    said = verdict(comparison, few, ("wrong", "trainer"))
    assert said.startswith(
        "wrong and trainer parted at layer 1 o_proj, in 1 row, but a second run did not repeat it"
    )


def test_log_probs_are_kept_as_they_are_hashed(engine, trainer, faulty, case) -> None:
    both = compare(engine(), trainer, case).logprobs
    assert both is not None
    assert len(both.rows) == sum(len(one.response) for one in case.sequences)
    assert not both.unequal.any()
    _, comparison = faulty("split-k")
    assert comparison.logprobs is not None
    last = comparison.results[-1]
    assert (last.point.op, last.num_unequal_rows) == (
        "logprob",
        int(comparison.logprobs.unequal.sum()),
    )
    apart = (comparison.logprobs.left - comparison.logprobs.right).abs().max()
    assert float(apart) == last.largest_difference > 0


@pytest.mark.parametrize("left", ["engine", "trainer"])
def test_a_row_that_the_trainer_shares_is_fed_to_the_engine(
    engine, trainer, case, left: str
) -> None:
    """The last token of a prompt: once in the trainer, for each sample in the engine, in one of
    which it is wrong.
    """
    few, point = ReplayCase(case.sequences[:2]), Point(0, "o_proj")
    wrong = Wrong(engine(), point, int(few.offsets[0]) + 8)
    comparison = compare(*((wrong, trainer) if left == "engine" else (trainer, wrong)), few)
    assert comparison.patched == "engine"
    assert kinds(comparison) == {"o_proj": 1}
    assert comparison.first_introduced is not None
    assert comparison.first_introduced.num_introduced_rows == 1


@pytest.mark.parametrize("tap", [HashTap, ValueTap])
def test_no_hook_is_left_behind(engine, case, tap) -> None:
    path = engine()
    path.run(case, tap(case.num_rows))
    assert not path.model._forward_pre_hooks
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in path.model.modules()
    )
    assert "logits" not in vars(path.model)


def said_of(path, comparison, other, case, folder) -> list[list[str]]:
    """What each side's arithmetic is called, at the first point where they part."""
    assert comparison.evidence is not None
    trial = VariantSearch(comparison.evidence, case, other.model, read_spec(folder))
    sides = []
    for side, values in ((path, comparison.evidence.patched), (other, comparison.evidence.other)):
        marks = ProfilerTap(case.num_rows)
        side.run(case, marks)
        sides.append((values, marks.step_of[:-1].tolist()))
    return [
        [
            match.description
            for match in trial.matches(comparison.first_introduced.point, values, pass_of)
        ]
        for values, pass_of in sides
    ]


ARITHMETIC = {
    "split-k": "K summed in 2 parts",
    "norm-order": "scaled by the weight before rounding",
    "rope-bf16": "tables rounded to bfloat16",
    "logits-bf16": "the contract's product, rounded to bfloat16",
    "library-logprob": "the library's log-softmax, then one entry",
}


@pytest.mark.parametrize("fault", ARITHMETIC)
def test_the_arithmetic_of_both_sides_is_named(faulty, trainer, case, folder, fault: str) -> None:
    wrong, right = said_of(*faulty(fault), trainer, case, folder)
    assert wrong == [ARITHMETIC[fault]]
    assert len(right) == 1
    assert "the contract's" in right[0]


def test_merged_ranges_are_named_row_by_row(faulty, trainer, case, folder) -> None:
    wrong, right = said_of(*faulty("auto-splits"), trainer, case, folder)
    assert wrong == [
        "one softmax over keys in ascending blocks, the contract's",
        "softmaxes of 2 ranges of keys, merged",
    ]
    assert len(right) == 1
