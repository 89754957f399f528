"""The kernels of `vocab_parallel_sample`: in Triton's interpreter, and compiled for Hopper."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.kernels.test_vocab_parallel import Draws, Rows, of_one, unequal

pytest.importorskip("triton")

from spmd_rl.kernels.vocab import logprob_triton, vocab_parallel_triton
from spmd_rl.kernels.vocab.logprob import NUM_VOCAB_SHARDS, VOCAB_CHUNK, shard_size
from spmd_rl.kernels.vocab.vocab_part import VocabPart
from tests.shared_ranks import Meeting, ThreadExchange
from tests.unit.kernels.compiled import compiled_of, compiling, instructions, ptx_of
from tests.unit.kernels.interpreted import Calls, results

CALLS = "tests.unit.kernels.vocab_parallel_calls"
QWEN3_VOCAB = 151936
# Code for rows of a multiple of 16 adds in another order: these rows lack what the whole's have,
# and have what the whole's lack.
NO_MULTIPLE_IN_PARTS, MULTIPLE_IN_A_PART = 32016, 50268


@pytest.fixture(autouse=True, scope="module")
def _compiled_here(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def cases() -> list[Rows]:
    """A vocabulary that shards do not divide, one with several chunks a shard, equal entries."""
    return [Rows(6, 1003, 0, 0), Rows(2, 9001, 0, 1), Rows(3, 300, 1, 2)]


def found(function: str, folder: Path, *given: object) -> list[Draws]:
    asked = [(*given, one.logits, *one.settings, one.greedy) for one in cases()]
    return [(one[0], one[1]) for one in results(Calls(CALLS, function, {}, asked), folder)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Draws]:
    return found("of_one", tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("count", [2, 8])
def test_parts_draw_what_the_whole_does(count: int, whole: list[Draws], tmp_path: Path) -> None:
    for one, wanted in zip(found("of_parts", tmp_path, count, False), whole, strict=True):
        assert unequal(one, wanted) == 0


def test_the_whole_draws_what_a_cpu_does(whole: list[Draws]) -> None:
    for (tokens, logprobs), rows in zip(whole, cases(), strict=True):
        expected = of_one(rows)
        assert torch.equal(tokens, expected[0])
        torch.testing.assert_close(logprobs, expected[1])


def test_sums_in_another_order_are_seen(whole: list[Draws], tmp_path: Path) -> None:
    """Negative control. Tokens do not depend on the sums."""
    backwards = found("of_parts", tmp_path, 4, True)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(backwards, whole, strict=True))
    assert sum(unequal(a, b) for a, b in zip(backwards, whole, strict=True)) > 0


def sums_of_part(size: int, rank: int, count: int) -> Any:
    part = VocabPart(rank, count, size, ThreadExchange(Meeting(1), 0))
    width = min(part.num_shards * shard_size(size), size - part.first)
    logits, entries = torch.zeros(17, width), torch.zeros(17, count, 4, dtype=torch.int32)
    launch = partial(vocab_parallel_triton.sums, logits, torch.ones(17), entries, part)
    return compiled_of(vocab_parallel_triton._sums, launch)


def sums_of_whole(size: int) -> Any:
    targets = torch.zeros(17, dtype=torch.int64)
    asked = torch.zeros(17, size), targets, torch.ones(17), NUM_VOCAB_SHARDS, VOCAB_CHUNK
    launch = partial(logprob_triton.logprob_forward, *asked)
    return compiled_of(logprob_triton._shard_sums, launch)


def lanes(compiled: Any) -> set[str]:
    """How the entries of a chunk lie in lanes, from which the order of additions follows."""
    code = compiled.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.blocked<\{(.*)\}>", code, re.MULTILINE))
    used = re.findall(rf"tt\.load.*tensor<{VOCAB_CHUNK}x!tt.ptr<f32>, (#\w+)>", code)
    assert used
    return {layouts[one] for one in used}


@pytest.mark.parametrize("size", [QWEN3_VOCAB, NO_MULTIPLE_IN_PARTS, MULTIPLE_IN_A_PART])
def test_sums_of_parts_add_in_the_order_of_the_whole(size: int) -> None:
    whole = sums_of_whole(size)
    wanted = instructions(whole.asm["ptx"])
    for rank, count in ((0, 2), (3, 4), (7, 8)):
        compiled = sums_of_part(size, rank, count)
        assert lanes(compiled) == lanes(whole)
        found = instructions(compiled.asm["ptx"])
        for one in ("ex2.approx.f32", "sub.rn.f32", "fma.rn.f32"):
            assert found[one] == wanted[one]
        assert found["ex2.approx.f32"] > 0
        assert size != QWEN3_VOCAB or any("ld.global" in one and "v4" in one for one in found)


@pytest.mark.parametrize("size", [NO_MULTIPLE_IN_PARTS, MULTIPLE_IN_A_PART])
def test_rows_with_another_alignment_are_seen(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(vocab_parallel_triton, "_missing_columns", lambda vocab, whole: 0)
    assert lanes(sums_of_part(size, 0, 2)) != lanes(sums_of_whole(size))


def test_a_rank_gives_24_bytes_of_a_row_to_three_others() -> None:
    part = VocabPart(1, 4, QWEN3_VOCAB, ThreadExchange(Meeting(1), 0))
    keys, entries = torch.zeros(17, dtype=torch.int64), torch.zeros(17, 4, 4, dtype=torch.int32)
    logits, ones = torch.zeros(17, QWEN3_VOCAB // 4), torch.ones(17)
    with compiling():
        own = vocab_parallel_triton.entries(logits, ones, keys, keys, None, part)
        sums = vocab_parallel_triton.sums(logits, ones, entries, part)
    assert own[0].nbytes + sums[0].nbytes == 24


def test_draws_of_parts_compile_and_fuse_nothing() -> None:
    part = VocabPart(1, 4, QWEN3_VOCAB, ThreadExchange(Meeting(1), 0))
    keys, given = torch.zeros(17, dtype=torch.int64), torch.zeros(17, 4, 4, dtype=torch.int32)
    asked = torch.zeros(17, QWEN3_VOCAB // 4), torch.ones(17), keys, keys, keys > 0
    launch = partial(vocab_parallel_triton.entries, *asked, part)
    compiled_of(vocab_parallel_triton._entries, launch)
    sums = torch.zeros(2, 17, NUM_VOCAB_SHARDS)
    launch = partial(vocab_parallel_triton.drawn, given, sums[0])
    ours = instructions(ptx_of(vocab_parallel_triton._drawn, launch))
    of_whole = torch.zeros(17, QWEN3_VOCAB), keys, torch.ones(17), torch.zeros(17, 5), sums
    launch = partial(logprob_triton.combined, *of_whole)
    theirs = instructions(ptx_of(logprob_triton._combine, launch))
    assert ours["fma.rn.f32"] == theirs["fma.rn.f32"]  # those of the logarithm
    assert theirs["add.rn.f32"] - ours["add.rn.f32"] == NUM_VOCAB_SHARDS - 1  # of the entropy
