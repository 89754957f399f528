"""A DeepEP for CPUs: what its `Buffer` does between the ranks of a gloo group, by pickled objects.

It has the calls that spmd_rl uses, and the order in which rows arrive. Each buffer takes the next
of `GROUPS`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

topk_idx_t = torch.int64
GROUPS: list[dist.ProcessGroup] = []  # of each buffer that is made, in their order
calls: list[str] = []  # which kind of dispatch each was


class Buffer:
    def __init__(
        self, group: None, *, num_nvl_bytes: int, explicitly_destroy: bool, comm: Any
    ) -> None:
        assert num_nvl_bytes > 0
        assert explicitly_destroy
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        assert comm.allgather(self.rank) == list(range(self.size))
        handles = comm.allgather(bytearray([self.rank, 7]))
        assert handles == [bytearray([rank, 7]) for rank in range(self.size)]
        self.group = GROUPS.pop(0)

    @staticmethod
    def get_dispatch_config(size: int) -> Any:
        return SimpleNamespace(get_nvl_buffer_size_hint=lambda row_bytes, ranks: row_bytes * ranks)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, ids: Tensor, num_experts: int) -> tuple[Any, ...]:
        owner = ids // (num_experts // self.size)
        wants = (owner.unsqueeze(2) == torch.arange(self.size)).any(1)
        per_expert = torch.bincount(ids.flatten(), minlength=num_experts).int()
        return wants.sum(0).int(), None, per_expert, wants, None

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        *,
        num_tokens_per_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_worst_tokens: int = 0,
    ) -> tuple[Any, ...]:
        calls.append("again" if handle is not None else "first")
        if handle is not None:
            _, wants, num_worst_tokens = handle
            return self._filled(self._moved(x, wants)[0], num_worst_tokens), None, None
        assert is_token_in_rank is not None
        assert topk_idx is not None
        assert topk_weights is not None
        assert num_tokens_per_expert is not None
        assert num_tokens_per_rank is not None
        assert torch.equal(num_tokens_per_rank, is_token_in_rank.sum(0).int())
        num_own = len(num_tokens_per_expert) // self.size
        rows, counts = self._moved(x, is_token_in_rank)
        ids = self._moved(topk_idx, is_token_in_rank)[0] - self.rank * num_own
        ids = torch.where((ids >= 0) & (ids < num_own), ids, -1)
        ends = torch.full((self.size, self.size), -1, dtype=torch.int32)
        ends[:, self.rank] = torch.tensor(counts).cumsum(0).int()
        filled = self._filled(rows, num_worst_tokens), self._filled(ids, num_worst_tokens)
        return *filled, None, [], (ends, is_token_in_rank, num_worst_tokens), None

    def _moved(self, x: Tensor, wants: Tensor) -> tuple[Tensor, list[int]]:
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, [x[wants[:, rank]] for rank in range(self.size)], self.group)
        mine = [of_rank[self.rank] for of_rank in every]
        return torch.cat(mine), [len(one) for one in mine]

    def _filled(self, rows: Tensor, number: int) -> Tensor:
        assert 0 < number >= len(rows), "without a number it would wait on the host"
        return torch.cat([rows, rows.new_full((number - len(rows), *rows.shape[1:]), -1)])
