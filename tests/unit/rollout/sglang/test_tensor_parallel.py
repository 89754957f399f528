"""The parts of a tensor that SGLang's ranks have, and the models that they cannot share."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import msgspec
import pytest
import torch
from torch import Tensor

from spmd_rl.errors import ConfigError, LostRankError, PlanError, WeightsError
from spmd_rl.model.spec import ModelSpec
from spmd_rl.rollout.sglang.build import watch
from spmd_rl.rollout.sglang.child_calls import CALLS, DIGEST, RECEIVE, SETTLE, ChildContext
from spmd_rl.rollout.sglang.child_scheduler import scheduler_class
from spmd_rl.rollout.sglang.child_weights import check_rules
from spmd_rl.rollout.sglang.client import SchedulerClient
from spmd_rl.rollout.sglang.follower import PassedOnCalls
from spmd_rl.rollout.sglang.launch import Child
from spmd_rl.rollout.sglang.messages import MESSAGES
from spmd_rl.rollout.sglang.tensor_parallel import (
    Greeting,
    RankChild,
    TensorParallel,
    check_sizes,
    shard_boxes,
)
from spmd_rl.weights.plan.layout import Box, Piece
from spmd_rl.weights.slab.peer_socket import PeerSocket
from tests.specs import attention_of, dense_spec, with_layers

SPEC = dense_spec(
    "qwen3",
    vocab=1000,
    hidden=64,
    inner=96,
    layers=2,
    heads=(8, 2, 8),
    positions=64,
    qkv_bias=True,
    qk_norm=True,
)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_ranks_have_every_element(size: int) -> None:
    """Each element once, but for key-value heads that several ranks have, and for the norms."""
    counts = {
        name: torch.zeros(shape, dtype=torch.int32)
        for name, shape in SPEC.parameter_shapes().items()
    }
    for rank in range(size):
        for name, box in shard_boxes(SPEC, rank, size).items():
            counts[name][box.within(Box((0,) * len(box.offset), tuple(counts[name].shape)))] += 1
    for name, count in counts.items():
        copies = size if "norm" in name else 1
        if "k_proj" in name or "v_proj" in name:
            copies = max(size // attention_of(SPEC).num_kv_heads, 1)
        assert torch.equal(count, torch.full_like(count, copies)), name


def test_parts_follow_the_heads_and_the_padded_vocabulary() -> None:
    boxes = shard_boxes(SPEC, 2, 4)
    layer = "model.layers.1."
    assert boxes[layer + "self_attn.q_proj.weight"] == Box((32, 0), (16, 64))
    assert boxes[layer + "self_attn.k_proj.weight"] == Box((8, 0), (8, 64))
    assert boxes[layer + "self_attn.o_proj.weight"] == Box((0, 32), (64, 16))
    assert boxes[layer + "mlp.up_proj.weight"] == Box((48, 0), (24, 64))
    assert boxes[layer + "mlp.down_proj.weight"] == Box((0, 48), (64, 24))
    # 1,000 rows are padded to 1,024
    assert boxes["model.embed_tokens.weight"] == Box((512, 0), (256, 64))
    assert shard_boxes(SPEC, 3, 4)["model.embed_tokens.weight"] == Box((768, 0), (232, 64))


@pytest.mark.parametrize(
    ("spec", "size", "sentence"),
    [
        (SPEC, 3, "does not divide the 8 attention heads"),
        (with_layers(SPEC, num_heads=9), 3, "neither divides the 2 key-value heads"),
        (with_layers(SPEC, intermediate_size=97), 2, "does not divide the 97 hidden units"),
        (replace(SPEC, vocab_size=20), 2, "leaves ranks without a token of the vocabulary"),
    ],
)
def test_what_cannot_be_split_is_refused(spec: ModelSpec, size: int, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_sizes(spec, size)


def test_a_part_without_a_rule_is_refused() -> None:
    view: dict[str, Tensor] = {"a": torch.zeros(2)}
    pieces = {name: Piece(name, (4,), "float32", Box((2,), (2,))) for name in "ab"}
    whole = {"b": Piece("b", (4,), "float32", Box((0,), (4,)))}
    check_rules({"a": pieces["a"], **whole}, view)
    with pytest.raises(WeightsError, match=r"part of 'b': set split\.infer\.tp = 1"):
        check_rules(pieces, view)


def test_ranks_agree_on_the_folder_to_meet_in_and_on_the_least_memory() -> None:
    def exchange(blob: bytes) -> list[bytes]:
        assert msgspec.msgpack.decode(blob, type=Greeting) == Greeting(0, "/mine", 0.5)
        return [msgspec.msgpack.encode(Greeting(0, "/first", 0.75)), blob]

    met = TensorParallel(1, 2, 0, exchange).greet(Path("/mine"), 0.5)
    assert met == (Path("/first"), 0.5)


def test_ranks_of_two_hosts_are_refused() -> None:
    def exchange(blob: bytes) -> list[bytes]:
        return [blob, msgspec.msgpack.encode(Greeting(1, "/other", None))]

    with pytest.raises(PlanError, match="on ranks of several hosts"):
        TensorParallel(0, 2, 0, exchange).greet(Path("/mine"), None)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[SchedulerClient]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        made = SchedulerClient(tmp_path, ours.fileno(), lambda: None)
        yield made
        made.close()


def test_the_end_of_another_ranks_child_is_noticed(client: SchedulerClient) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        watch(client, RankChild(3, child.pid))
        assert client.receive(0.0) is None
        child.kill()
    with pytest.raises(LostRankError, match=rf"of rank 3 \(pid {child.pid}\) ended"):
        client.receive(100.0)
    with pytest.raises(LostRankError, match="of rank 3"):
        watch(client, RankChild(3, child.pid))


def test_a_kernel_that_cannot_tell_is_not_asked(
    client: SchedulerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(pid: int) -> int:
        raise OSError(errno.ENOSYS, "no such call")

    monkeypatch.setattr(os, "pidfd_open", missing)
    watch(client, RankChild(3, os.getpid()))
    assert client.receive(0.0) is None


@dataclass
class FakeChild:
    socket: PeerSocket
    name: str = "the child"


def test_the_second_rank_hears_how_a_call_of_the_first_ended() -> None:
    """So that a failure is not left at the socket for the next push."""
    ours, theirs = socket.socketpair()
    child = FakeChild(PeerSocket(ours, "the child", MESSAGES))
    scheduler = PeerSocket(theirs, "the rank", MESSAGES)
    calls = PassedOnCalls(cast(Child, child))
    done: list[str] = []

    def work(context: ChildContext) -> None:
        done.append("work")
        if len(done) == 2:
            raise WeightsError("a part is missing")

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CALLS, RECEIVE, work)
        methods = vars(scheduler_class(object, scheduler, tells_end=True))
        methods[RECEIVE](None)
        calls.finish_call(RECEIVE, 10.0)
        with pytest.raises(WeightsError, match="a part is missing"):
            methods[RECEIVE](None)
        with pytest.raises(WeightsError, match="a part is missing"):
            calls.finish_call(RECEIVE, 10.0)
        methods[SETTLE](None)  # for which nobody waits here
        methods[RECEIVE](None)
        with pytest.raises(WeightsError, match="in place of the end of spmd_digest_weights"):
            calls.finish_call(DIGEST, 10.0)
    for one in (child.socket, scheduler):
        one.close()


def test_children_that_end_together_are_all_named(tmp_path: Path) -> None:
    def our_own() -> None:
        raise LostRankError("our child ended")

    ours, theirs = socket.socketpair()
    others = [os.pipe() for _ in range(2)]
    with ours, theirs:
        client = SchedulerClient(tmp_path, ours.fileno(), our_own)
        for rank, (readable, _) in enumerate(others):
            client.watch(readable, f"the child of rank {rank + 1}")
        os.close(others[0][1])
        theirs.close()
        with pytest.raises(LostRankError, match="^our child ended; the child of rank 1 ended too$"):
            client.receive(100.0)
        client.close()
    os.close(others[1][1])
