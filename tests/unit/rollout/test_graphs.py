"""Host side of the decode graphs, without a GPU: batch sizes and output buffers."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from spmd_rl.kernels.moe.route_hash import ROUTES
from spmd_rl.rollout.native import decode_graphs
from spmd_rl.rollout.native.decode_graphs import (
    NUM_OUTPUT_BUFFERS,
    DecodeGraphs,
    batch_sizes,
    page_table_width,
)
from spmd_rl.rollout.native.joint.joint_steps import JointStep
from spmd_rl.rollout.native.sequence_table import SequenceTable


def test_sizes_end_at_the_largest() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(40) == [1, 2, 4, 8, 16, 32, 40]


def test_page_tables_hold_whole_splits() -> None:
    assert page_table_width(num_pages=3, max_pages=70, split_pages=0) == 70
    widths = [
        page_table_width(num_pages, max_pages=70, split_pages=16)
        for num_pages in (1, 16, 17, 32, 33, 64, 65, 70)
    ]
    assert widths == [16, 16, 32, 32, 64, 64, 80, 80]


MODEL = SimpleNamespace(spec=SimpleNamespace(num_experts=4))


class OutputBuffers:
    def __init__(self, num_rows: int, has_experts: bool) -> None:
        assert has_experts
        self.tokens = torch.arange(NUM_OUTPUT_BUFFERS * num_rows).view(NUM_OUTPUT_BUFFERS, num_rows)
        self.logprobs = -self.tokens.float()
        self.routes = self.tokens + 1000

    columns = decode_graphs._OutputBuffers.columns


class GraphInputs:
    uploaded: ClassVar[list[int]] = []

    def __init__(self, fields: object, device: torch.device) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def upload(self, columns: dict[str, np.ndarray], padding: object) -> None:
        self.uploaded.append(int(columns["buffer"][0]))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> DecodeGraphs:
    monkeypatch.setattr(decode_graphs, "_OutputBuffers", OutputBuffers)
    monkeypatch.setattr(decode_graphs, "GraphInputs", GraphInputs)
    monkeypatch.setattr(
        decode_graphs, "record", lambda work, memory: (SimpleNamespace(replay=lambda: None), None)
    )
    monkeypatch.setattr(GraphInputs, "uploaded", [])
    cache = SimpleNamespace(device=torch.device("cpu"), split=0, page_size=4)
    return DecodeGraphs(MODEL, cache, SequenceTable(6, 64, 4), None, None)


def test_steps_alternate_between_the_output_buffers(graphs: DecodeGraphs) -> None:
    """A step's buffer is uploaded with its rows; between uploads, the device counts it on."""
    three, two = np.array([0, 2, 5]), np.array([1, 3])
    buffers = [
        graphs.launch(rows)[0][0].item() // 6 for rows in (three, three, three, two, two, three)
    ]
    assert buffers == [0, 1, 0, 1, 0, 1]
    # each size once as it is recorded, then for three rows first, for two, for three again
    assert GraphInputs.uploaded == [0, 0, 1, 1, 1]


def test_the_routes_of_a_step_are_those_of_its_buffer(graphs: DecodeGraphs) -> None:
    for _ in range(3):
        sampled = graphs.launch(np.array([0, 2, 5]))
        assert sampled.columns.keys() == {ROUTES}
        assert torch.equal(sampled.columns[ROUTES], sampled.tokens + 1000)


def test_a_step_takes_the_graph_with_the_room_that_ranks_agree_on(graphs: DecodeGraphs) -> None:
    """Without any row, all are padding; the graph is that of as many pages as rows have there."""
    for rows, room, size in (([], 3, 4), ([1], 3, 4), ([0, 2, 5], 1, 4), ([1], 1, 1), ([1], 6, 6)):
        sampled = graphs.launch(np.array(rows, np.int64), room=room)
        assert graphs._last_graph is not None
        assert graphs._last_graph.variant.size == size
        assert len(sampled.tokens) == len(rows)


@pytest.mark.parametrize(
    ("plans", "step"),
    [
        ([[0, 0], [0, 0]], (False, 0)),
        ([[0, 3], [0, 0], [0, 17]], (False, 17)),
        ([[1, 0], [0, 4]], (True, 4)),
        ([[1, 0], [1, 0]], (True, 0)),
    ],
)
def test_a_joint_step_has_the_parts_that_some_rank_plans(
    plans: list[list[int]], step: tuple[bool, int]
) -> None:
    assert JointStep.of(plans) == step


def test_graphs_let_go_of_are_gone_without_the_collector(graphs: DecodeGraphs, request) -> None:
    """They hold device memory, and freeing it late would end a recording under way."""
    made = DecodeGraphs(MODEL, graphs._cache, SequenceTable(6, 64, 4), None, None)
    made.launch(np.array([0]))
    gone = weakref.ref(made)
    request.addfinalizer(gc.enable)
    gc.disable()
    del made
    assert gone() is None
