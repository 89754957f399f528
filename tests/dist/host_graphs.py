"""Decode graphs without a GPU: a replay does the recorded work on the host."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.kernels import PagedAttention
from spmd_rl.kernels.moe.expert_gather import OwnExperts, TorchGather
from spmd_rl.kernels.moe.route_hash import short
from spmd_rl.kernels.moe.router import ExpertRoutes
from spmd_rl.kernels.moe.symm_gather import RowSizes
from spmd_rl.model.layers import moe_module
from spmd_rl.rollout.native import decode_graphs, engine, model_runner
from spmd_rl.rollout.native.decode_graphs import DecodeGraphs, _Variant
from spmd_rl.rollout.native.joint import joint_steps
from spmd_rl.rollout.native.prefill_graphs import PassedTokens
from spmd_rl.rollout.native.sampled_tokens import SampledOnDevice
from spmd_rl.rollout.native.step_budget import PrefillBound


class HostGather(TorchGather):
    """By torch's collectives, in place of `SymmGather`."""

    def __init__(
        self, group: dist.ProcessGroup, num_experts: int, max_rows: int, sizes: RowSizes
    ) -> None:
        super().__init__(group, num_experts)
        self.sizes = sizes

    def run(self, x: Tensor, routes: ExpertRoutes, experts: OwnExperts) -> Tensor:
        assert self.sizes == RowSizes(x.shape[1], routes.ids.shape[1], x.dtype)
        return super().run(x, routes, experts)

    def rehearsal(self) -> Any:
        """One that asks no other rank."""
        return SimpleNamespace(run=lambda x, routes, experts: torch.zeros_like(x))


class HostGraphs(DecodeGraphs):
    """Graphs whose work the host does. Rows of padding have no keys and values."""

    sizes: list[int]  # of the graphs that were replayed

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.sizes = []

    def launch(self, *asked: Any, **how: Any) -> SampledOnDevice:
        sampled = super().launch(*asked, **how)
        assert self._last_graph is not None
        self.sizes.append(self._last_graph.variant.size)
        routes = None if sampled.routes is None else sampled.routes.clone()
        return sampled._replace(routes=routes)

    def _compute(self, inputs: dict[str, Tensor], variant: _Variant) -> Tensor | None:
        rows, positions = inputs["rows"], inputs["positions"].clone()
        num_used = int((rows < self._table.num_rows).sum())
        attend = _Padded(self._attention(inputs, positions, num_used), num_used)
        given = self._newest_tokens[rows], positions, attend
        passed = PassedTokens.of(lambda: self._model(*given), variant.route_dtype)
        within = positions + 1 - inputs["answer_starts"]
        tokens, logprobs = self._draw(
            passed.hidden[: len(rows)],
            inputs["inv_temperature"],
            inputs["random_bases"],
            within,
            greedy=inputs["greedy"],
            **{name: inputs[name] for name in variant.filters},
        )
        self._newest_tokens[rows] = tokens
        buffer, output = inputs["buffer"] % 2, self._output_buffers
        output.tokens[buffer, : len(rows)] = tokens
        output.logprobs[buffer, : len(rows)] = logprobs
        if output.routes is not None:
            assert passed.hashed.state is not None
            output.routes[buffer, : len(rows)] = short(passed.hashed.state)[: len(rows)]
        inputs["buffer"].copy_(buffer + 1)
        inputs["positions"][:num_used] += 1
        return passed.routes

    def _attention(self, inputs: dict[str, Tensor], positions: Tensor, num_used: int) -> Any:
        if not num_used:
            return None
        starts, pages = positions[:num_used].numpy(), inputs["pages"][:num_used].long().numpy()
        page = pages[range(num_used), starts // self._cache.page_size]
        return PagedAttention.chunks(
            self._cache,
            page_table=pages,
            starts=starts,
            lengths=(starts * 0 + 1),
            slots=page * self._cache.page_size + starts % self._cache.page_size,
            states=inputs["rows"][:num_used].numpy(),
        )


class _Padded:
    """Attention of the rows in use; the others get zeros."""

    def __init__(self, inner: Any, num_used: int) -> None:
        self._inner, self._num_used = inner, num_used

    def rotate_and_attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Tensor:
        out = torch.zeros_like(q)
        if self._num_used:
            found = self._inner.rotate_and_attend(layer, q, k, v, *how)
            out[: self._num_used] = found[: self._num_used]
        return out

    def sequences(self, layer: int) -> Any:
        return self._inner.sequences(layer) if self._num_used else ()


class NoPrefillGraphs:
    """In place of graphs of prompts: none has room for any."""

    num_recorded = 0

    def __init__(self, *given: Any) -> None:
        pass

    def hidden_states(self, *given: Any) -> None:
        return None


def _recorded(
    work: Callable[[], Tensor | None],
    memory: object,
    rehearsal: Callable[[], object] | None = None,
) -> tuple[Any, Tensor | None]:
    """A graph whose replay does the work, and its static output."""
    out = (rehearsal or work)()
    assert out is None or isinstance(out, Tensor)

    def replay() -> None:
        found = work()
        if out is not None and found is not None:
            out.copy_(found)

    return SimpleNamespace(replay=replay), out


def use(patch: pytest.MonkeyPatch) -> None:
    """Have engines of this process record their decoding steps."""
    empty = torch.empty
    patch.setattr(torch, "empty", lambda *size, pin_memory=False, **how: empty(*size, **how))
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    patch.setattr(engine, "fits_cuda_graphs", lambda spec, backend, page_size: True)
    patch.setattr(engine, "prefill_bound", lambda spec, device, cfg: PrefillBound())
    patch.setattr(model_runner, "DecodeGraphs", HostGraphs)
    patch.setattr(model_runner, "PrefillGraphs", NoPrefillGraphs)
    patch.setattr(moe_module, "SymmGather", HostGather)
    patch.setattr(joint_steps, "record", _recorded)
    patch.setattr(decode_graphs, "record", _recorded)
