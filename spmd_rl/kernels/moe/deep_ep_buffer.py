"""DeepEpBuffer: rows between the GPUs of a host by DeepEP's kernels, in an order that is known.

A row goes once to each rank that wants it. Rows arrive in the order of their source ranks, and of
their places there. Who receives must know how many come: DeepEP's own wait for that number would
hold Python's lock, and no thread of this process could answer meanwhile.

Shape letters: T rows of this rank, N rows that come to it, K experts of a row, C columns; P ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.errors import ConfigError
from spmd_rl.kernels.runtime.collectives import rows_of_ranks
from spmd_rl.kernels.runtime.versions import installed

PACKAGE = "tokenspeed-deepep"  # as in setup.py
VERSION = "1.2.1.post20251110"
SIZES = (2, 4, 8)  # ranks between which its kernels of one host work
ALIGN_BYTES, MOST_BYTES = 32, 16368  # of a row
INT_BYTES = 8


class RankWants(NamedTuple):
    """Which ranks want each row. Shape: per_rank [P] and per_expert [E] int32, wants [T, P]."""

    per_rank: Tensor
    per_expert: Tensor
    wants: Tensor


class Way(NamedTuple):
    """What it takes to send other rows where some were sent, of which `num_rows` came here."""

    num_rows: int
    handle: Any


class ArrivedRows(NamedTuple):
    """Rows that came. `ids` are among this rank's own experts, or -1.

    Shape: rows [N, C], ids [N, K] int64, and `sources` [N] int64: the rank of each row.
    """

    rows: Tensor
    ids: Tensor
    sources: Tensor
    way: Way


class DeepEpBuffer:
    """The memory of DeepEP for a group, made by its own cudaMalloc and so in no pool that sleeps.

    All ranks of the group call each method together.
    """

    def __init__(self, group: dist.ProcessGroup, row_bytes: int) -> None:
        """Blocks: until all ranks of the group have called.

        Raises: ConfigError where DeepEP cannot run.
        """
        check_deep_ep(group.size())
        if row_bytes % ALIGN_BYTES or row_bytes > MOST_BYTES:
            raise ConfigError(
                f"deep_ep: a row has {row_bytes} bytes, but must have a multiple of {ALIGN_BYTES} "
                f'and at most {MOST_BYTES}; set trainer.backend.ep_dispatcher = "torch"'
            )
        from deep_ep import Buffer, topk_idx_t

        self._id_dtype: torch.dtype = topk_idx_t
        size, self._rank = group.size(), group.rank()
        configs = Buffer.get_dispatch_config(size), Buffer.get_combine_config(size)
        num_bytes = max(one.get_nvl_buffer_size_hint(row_bytes, size) for one in configs)
        # Its destructor would wait for all ranks, also for one that was killed.
        self.buffer: Any = Buffer(
            None, num_nvl_bytes=num_bytes, explicitly_destroy=True, comm=_ByteExchange(group)
        )
        dist.barrier(group)

    def layout(self, ids: Tensor, num_experts: int) -> RankWants:
        """Return which ranks the experts of each row are on. Shape: ids [T, K] int64."""
        per_rank, _, per_expert, wants, _ = self.buffer.get_dispatch_layout(
            ids.to(self._id_dtype).contiguous(), num_experts
        )
        return RankWants(per_rank, per_expert, wants)

    def send(self, x: Tensor, ids: Tensor, layout: RankWants, num_rows: int) -> ArrivedRows:
        """Send each row to the ranks that want it. `num_rows` come to this one.

        Shape: x [T, C], ids [T, K] int64.
        """
        wanted = ids.to(self._id_dtype).contiguous()
        if not len(wanted):  # the kernel wants no address, as `ones` of no rows has none
            wanted = torch.empty_like(wanted)
        rows, own, _, _, handle, _ = self.buffer.dispatch(
            x.contiguous(),
            num_tokens_per_rank=layout.per_rank,
            is_token_in_rank=layout.wants,
            num_tokens_per_expert=layout.per_expert,
            topk_idx=wanted,
            topk_weights=torch.ones(ids.shape, device=ids.device),
            num_worst_tokens=max(num_rows, 1),  # without it, it waits on the host
        )
        ends = handle[0][:, self._rank].contiguous()  # rows of all ranks up to each one
        places = torch.arange(num_rows, dtype=ends.dtype, device=ends.device)
        sources = torch.searchsorted(ends, places, right=True)
        return ArrivedRows(rows[:num_rows], own[:num_rows].long(), sources, Way(num_rows, handle))

    def send_again(self, x: Tensor, way: Way) -> Tensor:
        """Send other rows the same way. Shape: x [T, C]; returns [N, C]."""
        rows: Tensor = self.buffer.dispatch(x.contiguous(), handle=way.handle)[0]
        return rows[: way.num_rows]


def check_deep_ep(num_ranks: int) -> None:
    """Raises: ConfigError where DeepEP cannot run between so many ranks, or is not installed."""
    at = 'trainer.backend.ep_dispatcher = "deep_ep"'
    if num_ranks not in SIZES:
        sizes = ", ".join(map(str, SIZES))
        raise ConfigError(f"{at} is for {sizes} ranks that share experts, not {num_ranks}")
    if installed(PACKAGE) != VERSION:
        raise ConfigError(
            f"{at} needs {PACKAGE} {VERSION}, not {installed(PACKAGE)}: pip install -e "
            "'.[deep_ep]' in the repository of spmd_rl, or set it to \"torch\""
        )
    if not torch.cuda.is_available():
        raise ConfigError(f'{at} needs GPUs; set it to "torch"')


class _ByteExchange:
    """What DeepEP asks of mpi4py to exchange handles: bytes and numbers, and no pickles."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def Get_rank(self) -> int:
        return self._group.rank()

    def Get_size(self) -> int:
        return self._group.size()

    def allgather(self, value: int | bytearray) -> list[Any]:
        is_number = isinstance(value, int)
        sent = bytearray(value.to_bytes(INT_BYTES, "little")) if isinstance(value, int) else value
        own = torch.frombuffer(sent, dtype=torch.uint8).cuda()
        found = rows_of_ranks(own, self._group).view(self._group.size(), -1)
        every = [bytearray(one.cpu().numpy().tobytes()) for one in found]
        return [int.from_bytes(one, "little") for one in every] if is_number else every
