"""Graphs are recorded while other threads work, such as one that writes a checkpoint."""

from __future__ import annotations

import threading

import torch

from spmd_rl.kernels.runtime.cuda_graph import record

WAIT_S = 60


def test_other_threads_may_allocate_and_wait_for_their_streams() -> None:
    held, recording, done, failures = [], threading.Event(), threading.Event(), []
    x = torch.zeros(8, device="cuda")

    def beside() -> None:
        recording.wait(WAIT_S)
        try:
            held.append(torch.empty(256 << 20, dtype=torch.uint8, device="cuda"))
            torch.cuda.Stream().synchronize()
        except RuntimeError as error:
            failures.append(error)
        done.set()

    def work() -> None:
        if torch.cuda.is_current_stream_capturing():
            recording.set()
            done.wait(WAIT_S)
        x.add_(1)

    other = threading.Thread(target=beside)
    other.start()
    torch.cuda.empty_cache()
    graph, _ = record(work, torch.cuda.graph_pool_handle())
    other.join()
    graph.replay()
    assert (failures, x.tolist()) == ([], [2.0] * 8)
