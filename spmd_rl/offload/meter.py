"""Meter of one sleep or wake on one rank: it makes the receipt."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from spmd_rl.offload.copies import Copy
from spmd_rl.offload.region import Region, torch_regions
from spmd_rl.offload.residency import Receipt


class Meter:
    """Measures what happens to `regions` from its construction to `receipt`."""

    def __init__(self, regions: Iterable[Region], device: torch.device) -> None:
        self._regions = list(regions)
        self._device = device
        self._before = self._mapped_bytes()
        self._free_before = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
        self._map_s = 0.0
        self._copied_bytes = 0
        self._copy_s = 0.0
        self._exposed_s = 0.0

    def add_bytes(self, copy: Copy) -> None:
        """Count the bytes of a copy that was started."""
        self._copied_bytes += copy.num_bytes

    def wait(self, copy: Copy) -> None:
        """Wait for a copy, and count its time. Blocks: until it is done."""
        self._exposed_s += copy.wait()
        self._copy_s += copy.seconds

    @contextmanager
    def mapping(self) -> Iterator[None]:
        """Add what runs inside to the time of mapping."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._map_s += time.perf_counter() - began

    def receipt(self) -> Receipt:
        free, residue = self._left()
        return Receipt(
            before=self._before,
            after=self._mapped_bytes(),
            copied_bytes=self._copied_bytes,
            map_s=self._map_s,
            copy_s=self._copy_s,
            exposed_s=self._exposed_s,
            free_bytes=(self._free_before, free) if self._device.type == "cuda" else (),
            residue=residue,
        )

    def _mapped_bytes(self) -> dict[str, int]:
        return {region.tag: region.mapped_bytes for region in self._regions}

    def _left(self) -> tuple[int, dict[str, int]]:
        """Return the free bytes of the GPU, and what is in use besides mapped regions of this role.

        By class: `torch` and `torch_cache` are what torch has outside of regions, in use or not;
        `other_roles` are mapped regions of torch of other roles; `outside` is all else: contexts,
        communicators, and slabs of other roles.
        """
        if self._device.type != "cuda":
            return 0, {}
        free, total = torch.cuda.mem_get_info(self._device)
        statistics = torch.cuda.memory_stats(self._device)
        reserved = statistics["reserved_bytes.all.current"]
        allocated = statistics["allocated_bytes.all.current"]
        pools = [region for region in torch_regions if region.device == self._device]
        cached = reserved - allocated - sum(one.num_bytes - one.used_bytes for one in pools)
        residue = {
            "torch": max(allocated - sum(one.used_bytes for one in pools), 0),
            "torch_cache": max(cached, 0),
            "other_roles": sum(one.mapped_bytes for one in pools if one not in self._regions),
        }
        own = sum(region.mapped_bytes for region in self._regions)
        residue["outside"] = max(total - free - own - sum(residue.values()), 0)
        return free, residue
