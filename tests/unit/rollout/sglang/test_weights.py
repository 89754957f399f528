"""Pushes into the child: rules for fused parameters, parts of tensors, and what goes wrong."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from spmd_rl.errors import LostRankError, SpmdError, WeightsError
from spmd_rl.model.hf import random_weights
from spmd_rl.model.read import read_spec
from spmd_rl.rollout.engine import Request
from spmd_rl.rollout.sglang.child_weights import parameter_views
from spmd_rl.rollout.sglang.engine import SglangEngine
from spmd_rl.weights.ends import LocalEnds
from spmd_rl.weights.executors import Executor, execute
from spmd_rl.weights.local_tensors import LocalTensors
from spmd_rl.weights.plan.layout import Box, Piece
from spmd_rl.weights.plan.moves import plan_moves
from spmd_rl.weights.proof.digest import digest
from spmd_rl.weights.slab.peer_socket import PeerMessage, PortionTable, RepeatedPortion
from spmd_rl.weights.tensor_ends import TensorSource
from tests.engine_suite import GREEDY, push, put
from tests.unit.rollout.sglang.conftest import built

New = Callable[..., SglangEngine]
SHAPES = {
    "a.q_proj.weight": (4, 3),
    "a.k_proj.weight": (2, 3),
    "a.v_proj.weight": (2, 3),
    "m.gate_proj.weight": (5, 3),
    "m.up_proj.weight": (5, 3),
    "embed_tokens.weight": (7, 3),
    "norm.weight": (3,),
}
PIECES = {
    name: Piece(name, shape, "float32", Box((0,) * len(shape), shape))
    for name, shape in SHAPES.items()
}


@pytest.fixture(scope="module")
def engine(folder: Path, site: Path) -> Iterator[SglangEngine]:
    """The engine of tests that push one after another, until the last one kills it."""
    engine = built(folder, site, slab_bytes=4096)
    yield engine
    engine.close()


@pytest.fixture
def weights(folder: Path) -> dict[str, Tensor]:
    return dict(random_weights(read_spec(folder), 0))


def model(**rows: int) -> nn.Module:
    """Parameters as SGLang has them; keywords change the rows of one."""
    sizes = {"qkv_proj": 8, "gate_up_proj": 10, "embed_tokens": 64} | rows
    made = nn.Module()
    made.a, made.m = nn.Module(), nn.Module()
    made.a.qkv_proj = nn.Linear(3, sizes["qkv_proj"], bias=False)
    made.m.gate_up_proj = nn.Linear(3, sizes["gate_up_proj"], bias=False)
    made.embed_tokens = nn.Embedding(sizes["embed_tokens"], 3)
    made.norm = nn.RMSNorm(3)
    return made


def test_every_tensor_has_its_part_of_a_parameter() -> None:
    made = model()
    views = parameter_views(made, PIECES)
    assert set(views) == set(SHAPES)
    assert views["a.k_proj.weight"].data_ptr() == made.a.qkv_proj.weight[4:].data_ptr()
    assert views["a.v_proj.weight"].data_ptr() == made.a.qkv_proj.weight[6:].data_ptr()
    assert views["m.up_proj.weight"].data_ptr() == made.m.gate_up_proj.weight[5:].data_ptr()
    assert views["embed_tokens.weight"].shape == (7, 3)


@pytest.mark.parametrize(
    ("change", "lost"),
    [({"qkv_proj": 9}, "a.q_proj.weight"), ({"gate_up_proj": 12}, "m.up_proj.weight")],
)
def test_a_parameter_of_another_size_has_no_rule(change: dict[str, int], lost: str) -> None:
    assert lost not in parameter_views(model(**change), PIECES)


def test_a_model_that_derives_from_its_weights_has_no_rules() -> None:
    made = model()
    made.post_load_weights = lambda: None
    assert parameter_views(made, PIECES) == {}


def test_a_dtype_of_its_own_has_no_rule() -> None:
    made = model()
    made.norm = made.norm.to(torch.bfloat16)
    assert "norm.weight" not in parameter_views(made, PIECES)


@pytest.mark.parametrize("options", [{}, {"quantization": "fp8"}], ids=["rules", "load_weights"])
def test_a_push_in_small_portions_arrives(
    new_engine: New, weights: dict[str, Tensor], options: dict[str, object]
) -> None:
    """The slab is smaller than some tensors, so that these go in parts."""
    engine = new_engine(slab_bytes=4096, options=options)
    push(engine, weights, 1)
    push(engine, {name: tensor + 1 for name, tensor in weights.items()}, 2)
    engine.submit(Request(1, 0, np.arange(2, 5, dtype=np.int32), GREEDY))
    while engine.has_work:
        output = engine.step()
    assert output.finished[0].versions.tolist() == [2] * len(output.finished[0].tokens)


def test_the_runtime_repeats_a_push_without_tables(
    new_engine: New, weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push of one tensor in between replaces the tables of its own portions alone."""
    engine = new_engine(slab_bytes=4096)
    sink, socket = engine.sink(), engine.child.socket
    masters = {name: tensor.clone() for name, tensor in weights.items()}
    source = TensorSource(LocalTensors.whole(masters).items())
    ends = LocalEnds(0, source, sink, torch.device("cpu"))
    moves = plan_moves([source.layout(0)], [sink.layout(0)], None, 0).moves
    executor = Executor(moves, ends)
    sent: list[object] = []
    send = socket.send

    def record(message: PeerMessage, *deadline_s: float) -> None:
        sent.append(message)
        send(message, *deadline_s)

    def pushed(run: Callable[[], object]) -> tuple[int, int]:
        """Push other values, and return the numbers of tables and of repeated portions."""
        sent.clear()
        for tensor in masters.values():
            tensor += 1
        sink.open()
        run()
        sink.commit(1)
        tables = sum(isinstance(message, PortionTable) for message in sent)
        return tables, sum(isinstance(message, RepeatedPortion) for message in sent)

    def verify() -> None:
        held = {name: value for (name, _), value in sink.digest().items()}
        assert held == digest(LocalTensors.whole(masters))

    monkeypatch.setattr(socket, "send", record)
    num_portions, none = pushed(lambda: executor.run(None))
    assert (num_portions > 3, none) == (True, 0)
    verify()
    assert pushed(lambda: executor.run(None)) == (0, num_portions)
    verify()
    last = [move for move in moves if move.name == moves[-1].name]
    num_tables, none = pushed(lambda: execute(last, ends, None))
    assert (0 < num_tables < num_portions, none) == (True, 0)
    assert pushed(lambda: executor.run(None)) == (num_tables, num_portions - num_tables)
    verify()
    assert pushed(lambda: executor.run(None)) == (0, num_portions)
    verify()


def test_a_repeated_push_of_a_part_is_refused_again(
    engine: SglangEngine, weights: dict[str, Tensor]
) -> None:
    names = list(weights)
    for _ in range(2):
        _send(engine, {name: weights[name] for name in names[:-1]})
        with pytest.raises(WeightsError, match=f"a push brought only a part of '{names[-1]}'"):
            engine.sink().commit(1)


def test_a_wrong_bit_in_a_parameter_is_seen(new_engine: New, weights: dict[str, Tensor]) -> None:
    """It is the parameters that are digested, not what came."""
    engine = new_engine(options={"fake_wrong_byte": True})
    with pytest.raises(AssertionError):
        push(engine, weights, 1)
    sink = engine.sink()
    held = {name: value for (name, _), value in sink.digest().items()}
    own = digest(LocalTensors.whole(weights))
    assert [name for name in own if own[name] != held[name]] == ["model.embed_tokens.weight"]


def _send(engine: SglangEngine, weights: dict[str, Tensor]) -> None:
    sink = engine.sink()
    sink.open()
    put(sink, weights)


def test_a_push_of_some_tensors_is_refused_at_first(
    engine: SglangEngine, weights: dict[str, Tensor]
) -> None:
    names = list(weights)
    _send(engine, {name: weights[name] for name in names[:-1]})
    with pytest.raises(WeightsError, match=f"a push brought only a part of '{names[-1]}'"):
        engine.sink().commit(1)
    with pytest.raises(SpmdError, match="no weights of a known version"):
        engine.step()
    push(engine, weights, 2)
    _send(engine, {names[0]: weights[names[0]]})
    engine.sink().commit(3)


def test_a_push_that_was_given_up_is_followed_by_another(
    engine: SglangEngine, weights: dict[str, Tensor]
) -> None:
    _send(engine, {name: weights[name] for name in list(weights)[:3]})
    push(engine, weights, 1)


def test_a_child_killed_during_a_push_is_one_sentence(
    engine: SglangEngine, weights: dict[str, Tensor]
) -> None:
    _send(engine, {name: weights[name] for name in list(weights)[:3]})
    os.kill(engine.child.pid, signal.SIGKILL)
    with pytest.raises(LostRankError, match=rf"pid {engine.child.pid}"):
        _send(engine, weights)
    with pytest.raises(SpmdError, match="no weights of a known version"):
        engine.step()
