"""Regions of one role on one rank: they sleep and wake together, or tag by tag.

A sleep copies what is saved to the host, then unmaps. A wake first compares the free memory with
what it needs; it maps everything or nothing. Bytes can travel in the background: a save from before
the sleep on, and a load until its memory is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count

import torch
from torch import Tensor

from spmd_rl.errors import ResidencyError
from spmd_rl.offload.arena import rank_arena
from spmd_rl.offload.ledger import as_size
from spmd_rl.offload.meter import Meter
from spmd_rl.offload.region import Contents, Region, SlabRegion, TorchRegion
from spmd_rl.offload.residency import Receipt
from spmd_rl.offload.vmm import free_bytes

# for page tables, and because torch_memory_saver ends the process where memory runs out
MARGIN_BYTES = 32 << 20

_NUMBERS = count()  # names of regions of torch are unique in a process


class Regions:
    """The regions of the role `name`, by tag. The rank's main thread alone uses it.

    `host_bytes` bounds the host memory of all roles of the rank; 0 stands for what cgroup and
    machine leave.
    """

    def __init__(self, name: str, device: torch.device, host_bytes: int = 0) -> None:
        self._name = name
        self._device = device
        self._arena = rank_arena(device, host_bytes)
        self._regions: dict[str, Region] = {}

    def __contains__(self, tag: str) -> bool:
        return tag in self._regions

    def __getitem__(self, tag: str) -> Region:
        return self._regions[tag]

    @property
    def host_bytes(self) -> int:
        """The host memory that saved contents take."""
        return sum(region.host_bytes for region in self._regions.values())

    def reserve(self, num_bytes: int) -> Tensor:
        """Return host memory of the rank's arena, for bytes that have no region.

        Blocks, raises: as `HostArena.reserve`.
        """
        return self._arena.reserve(num_bytes)

    def reserve_saves(self) -> None:
        """Take the host memory of all contents that are saved now, before the first sleep.

        Blocks: as `HostArena.reserve`. Raises: ResidencyError where the host has no room.
        """
        for region in self._regions.values():
            if region.contents == "save" and region.residency.is_mapped:
                region.reserve_host(self._arena)

    def torch_region(self, tag: str, contents: Contents) -> TorchRegion:
        """Make a region for what torch allocates. Raises: ResidencyError where the tag is taken."""
        name = f"{self._name}.{tag}-{next(_NUMBERS)}"
        region = TorchRegion(tag, contents, self._device, name)
        self._add(region)
        return region

    def slab(self, tag: str, contents: Contents, num_bytes: int) -> SlabRegion:
        """Allocate one piece of memory. A slab under the same tag is let go of first.

        Raises: ResidencyError where too little is left.
        """
        if isinstance(self._regions.get(tag), SlabRegion):
            del self._regions[tag]
        region = SlabRegion(tag, contents, self._device, num_bytes)
        self._add(region)
        return region

    def is_awake(self, tag: str) -> bool:
        """Whether the memory may be used: a tag that has no region always is awake."""
        return tag not in self or self[tag].residency.state in ("awake", "saving")

    def note_change(self, tag: str) -> None:
        """Note that the contents change, so that what is saved of them is old.

        Blocks: until a save in the background has read them.
        Raises: ResidencyError unless the region is awake.
        """
        region = self[tag]
        if region.residency.state == "saving":
            self._finish_save(region)
            region.residency.move("awake")
        region.residency.require_awake("change")
        region.changes += 1

    def begin_save(self, tags: Iterable[str]) -> None:
        """Start to save contents in the background, for a sleep that comes soon.

        The save begins after the work that is queued on the current stream. The memory may be read
        meanwhile. Raises: ResidencyError where the host has no room.
        """
        for region in self._chosen(tags):
            if region.contents == "save" and region.residency.state == "awake":
                region.begin_save(self._arena)

    def sleep(self, tags: Iterable[str] | None = None) -> Receipt:
        """Give memory back: of these tags, or all, and what torch only caches.

        What sleeps already is left as it is.
        Blocks: until the GPU has finished its queued work and contents are saved.
        Raises: ResidencyError where the host has no room for contents; all memory is then awake.
        """
        chosen = [region for region in self._chosen(tags) if region.residency.is_mapped]
        if chosen and self._device.type == "cuda":  # so that computation is not taken for a copy
            torch.cuda.current_stream(self._device).synchronize()
        meter = Meter(self._regions.values(), self._device)
        for region in chosen:
            self._finish_load(region, meter)
        try:
            self.begin_save(region.tag for region in chosen)
            for region in chosen:
                self._finish_save(region, meter)
            with meter.mapping():
                self._unmap_all(chosen)
        except BaseException:
            for region in chosen:
                if region.residency.state == "saving":
                    self._finish_save(region)
                    region.residency.move("awake")
            raise
        return meter.receipt()

    def wake(self, tags: Iterable[str] | None = None, in_background: Iterable[str] = ()) -> Receipt:
        """Take memory again: of these tags, or all, with the contents that were saved.

        Contents of `in_background` may arrive later: `wait_loaded` has later work wait for them.
        Blocks: until all other contents are there.
        Raises: ResidencyError where too little memory is left; what slept then sleeps.
        """
        chosen = [region for region in self._chosen(tags) if not region.residency.is_mapped]
        meter, late = Meter(self._regions.values(), self._device), frozenset(in_background)
        with meter.mapping():
            self._map_all(chosen)
        try:
            for region in sorted(chosen, key=lambda region: region.tag in late):
                self._begin_load(region, meter)
        except BaseException:
            self._undo_wake(chosen)
            raise
        for region in chosen:
            if region.tag not in late:
                self._finish_load(region, meter)
        return meter.receipt()

    def wait_loaded(self, tag: str) -> None:
        """Have later work of the current stream wait for contents that come in the background."""
        if tag not in self or self[tag].residency.state != "loading":
            return
        region = self[tag]
        if region.copy is not None and self._device.type == "cuda":
            region.copy.order_before(torch.cuda.current_stream(self._device))
        region.copy = None
        region.residency.move("awake")

    def _add(self, region: Region) -> None:
        if region.tag in self._regions:
            raise ResidencyError(f"{self._name} has memory '{region.tag}' already")
        self._regions[region.tag] = region

    def _chosen(self, tags: Iterable[str] | None) -> list[Region]:
        """Return the regions of these tags, or all; a tag without a region names nothing."""
        if tags is None:
            return list(self._regions.values())
        return [self._regions[tag] for tag in dict.fromkeys(tags) if tag in self._regions]

    def _unmap_all(self, regions: Sequence[Region]) -> None:
        if not regions:
            return
        on_gpu = self._device.type == "cuda"
        if on_gpu:  # work of other streams may use the memory
            torch.cuda.synchronize(self._device)
        for region in regions:
            region.unmap()
            region.residency.move("asleep")
        if on_gpu:  # gradients and activations of the phase that ends
            torch.cuda.empty_cache()

    def _map_all(self, regions: Sequence[Region]) -> None:
        """Map all of these regions, or none of them."""
        self._require_room(regions)
        mapped: list[Region] = []
        try:
            # slabs first: a slab that cannot be mapped raises an error
            for region in sorted(regions, key=lambda region: isinstance(region, TorchRegion)):
                region.map()
                mapped.append(region)
        except BaseException:
            for region in mapped:
                region.unmap()
            raise

    def _undo_wake(self, regions: Sequence[Region]) -> None:
        """Unmap memory that was mapped. What was saved of it is on the host as before."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for region in regions:
            region.copy = None
            region.unmap()
            if region.residency.is_mapped:
                region.residency.move("asleep")

    def _require_room(self, regions: Sequence[Region]) -> None:
        if self._device.type != "cuda" or not regions:
            return
        needed = sum(region.num_bytes for region in regions) + MARGIN_BYTES
        free = free_bytes(self._device, needed)
        if free < needed:
            sizes = " and ".join(f"{one.tag} {as_size(one.num_bytes)}" for one in regions)
            raise ResidencyError(
                f"{self._name} needs {as_size(needed)} to wake ({sizes}, and a margin), and the "
                f"GPU has {as_size(free)} left"
            )

    def _begin_load(self, region: Region, meter: Meter) -> None:
        """Start to bring saved contents back. Contents that are not saved have changed."""
        if region.contents == "save" and region.is_saved:
            region.begin_load()
            if region.copy is not None:
                meter.add_bytes(region.copy)
        else:
            region.residency.move("awake")
            region.changes += 1

    def _finish_save(self, region: Region, meter: Meter | None = None) -> None:
        """Wait for a save, and count it with `meter`."""
        if region.residency.state == "saving" and region.copy is not None:
            if meter is None:
                region.copy.wait()
            else:
                meter.add_bytes(region.copy)
                meter.wait(region.copy)
            region.copy = None

    def _finish_load(self, region: Region, meter: Meter) -> None:
        if region.residency.state == "loading" and region.copy is not None:
            meter.wait(region.copy)
            region.copy = None
            region.residency.move("awake")
