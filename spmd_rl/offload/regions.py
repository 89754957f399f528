"""Regions of one role on one rank: they sleep and wake together, or tag by tag.

A sleep copies what is saved to the host, then unmaps. A wake first compares the free memory with
what it needs; it maps everything or nothing. Bytes can travel in the background: a save from before
the sleep on, and a load until its memory is needed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from spmd_rl.errors import ResidencyError
from spmd_rl.offload.arena import HostArena
from spmd_rl.offload.ledger import as_size
from spmd_rl.offload.region import Contents, Region, SlabRegion, TorchRegion
from spmd_rl.offload.residency import Receipt


class Regions:
    """The regions of the role `name`, by tag. The rank's main thread alone uses it.

    `host_bytes` bounds the host memory of saved contents; 0 stands for what the machine leaves.
    """

    def __init__(self, name: str, device: torch.device, host_bytes: int = 0) -> None:
        self._name = name
        self._device = device
        self._arena = HostArena(device, host_bytes)
        self._regions: dict[str, Region] = {}

    def __contains__(self, tag: str) -> bool:
        return tag in self._regions

    def __getitem__(self, tag: str) -> Region:
        return self._regions[tag]

    @property
    def host_bytes(self) -> int:
        """The host memory that saved contents take."""
        return self._arena.num_bytes

    def reserve(self, num_bytes: int) -> Tensor:
        """Return host memory for what is no region. Raises: as `HostArena.reserve`."""
        return self._arena.reserve(num_bytes)

    def torch_region(self, tag: str, contents: Contents) -> TorchRegion:
        """Make a region for what torch allocates. Raises: ResidencyError where the tag is taken."""
        region = TorchRegion(tag, contents, self._device, f"{self._name}.{tag}")
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

        Raises: ResidencyError unless the region is awake.
        """
        region = self[tag]
        if region.residency.state == "saving":
            self._finish_save(region)
            region.residency.move("awake")
        if region.residency.state != "awake":
            raise ResidencyError(f"memory '{tag}' is {region.residency.state}: it cannot change")
        region.changes += 1

    def begin_save(self, tags: Iterable[str]) -> None:
        """Start to save contents in the background, for a sleep that comes soon.

        The memory may be read meanwhile. Raises: ResidencyError where the host has no room.
        """
        for region in self._chosen(tags):
            if region.contents == "save" and region.residency.state == "awake":
                region.begin_save(self._arena)

    def sleep(self, tags: Iterable[str] | None = None) -> Receipt:
        """Give memory back: of these tags, or all. What sleeps already is left as it is.

        Blocks: until contents are saved and the GPU has finished its queued work.
        Raises: ResidencyError where the host has no room for contents; all memory is then awake.
        """
        chosen = [region for region in self._chosen(tags) if region.residency.is_mapped]
        meter = _Meter(self._regions.values(), self._device)
        for region in chosen:
            self._finish_load(region, meter)
        before = {id(region): region.residency.state for region in chosen}
        try:
            self.begin_save(region.tag for region in chosen)
        except ResidencyError:
            for region in chosen:
                if region.residency.state == "saving" and before[id(region)] == "awake":
                    self._finish_save(region, meter)
                    region.residency.move("awake")
            raise
        for region in chosen:
            self._finish_save(region, meter)
        with meter.mapping():
            if chosen and self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            for region in chosen:
                region.unmap()
                region.residency.move("asleep")
        return meter.receipt()

    def wake(self, tags: Iterable[str] | None = None, in_background: Iterable[str] = ()) -> Receipt:
        """Take memory again: of these tags, or all, with the contents that were saved.

        Contents of `in_background` may arrive later: `wait_loaded` has later work wait for them.
        Blocks: until all other contents are there.
        Raises: ResidencyError where too little memory is left; what slept then sleeps.
        """
        chosen = [region for region in self._chosen(tags) if not region.residency.is_mapped]
        meter, late = _Meter(self._regions.values(), self._device), frozenset(in_background)
        with meter.mapping():
            self._map_all(chosen)
        for region in chosen:
            if region.contents == "save" and region.is_saved:
                region.begin_load(self._arena)
                meter.copied_bytes += region.copy.num_bytes if region.copy else 0
            else:
                region.residency.move("awake")
                region.changes += 1
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

    def _map_all(self, regions: Sequence[Region]) -> None:
        """Map all of these regions, or none of them."""
        self._require_room(sum(region.num_bytes for region in regions))
        mapped: list[Region] = []
        try:
            for region in regions:
                region.map()
                mapped.append(region)
        except BaseException:
            for region in mapped:
                region.unmap()
            raise

    def _require_room(self, num_bytes: int) -> None:
        if self._device.type != "cuda" or not num_bytes:
            return
        free = torch.cuda.mem_get_info(self._device)[0]
        if free < num_bytes:
            torch.cuda.empty_cache()  # torch gives back what it only caches
            free = torch.cuda.mem_get_info(self._device)[0]
        if free < num_bytes:
            raise ResidencyError(
                f"{self._name} needs {as_size(num_bytes)} to wake, and the GPU has "
                f"{as_size(free)} left"
            )

    def _finish_save(self, region: Region, meter: _Meter | None = None) -> None:
        if region.residency.state == "saving" and region.copy is not None:
            exposed_s = region.copy.wait()
            if meter is not None:
                meter.add_copy(region, exposed_s)
            region.copy = None

    def _finish_load(self, region: Region, meter: _Meter) -> None:
        if region.residency.state == "loading" and region.copy is not None:
            exposed_s = region.copy.wait()
            meter.copy_s += region.copy.seconds
            meter.exposed_s += exposed_s
            region.residency.move("awake")


class _Meter:
    """Measures one sleep or wake for its receipt."""

    def __init__(self, regions: Iterable[Region], device: torch.device) -> None:
        self._regions = list(regions)
        self._device = device
        self._before = self._mapped_bytes()
        self._free_before = self._free_bytes()
        self._map_s = 0.0
        self.copied_bytes = 0
        self.copy_s = 0.0
        self.exposed_s = 0.0

    def add_copy(self, region: Region, exposed_s: float) -> None:
        if region.copy is not None:
            self.copied_bytes += region.copy.num_bytes
            self.copy_s += region.copy.seconds
            self.exposed_s += exposed_s

    @contextmanager
    def mapping(self) -> Iterator[None]:
        """Add what runs inside to the time of mapping."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._map_s += time.perf_counter() - began

    def receipt(self) -> Receipt:
        return Receipt(
            before=self._before,
            after=self._mapped_bytes(),
            copied_bytes=self.copied_bytes,
            map_s=self._map_s,
            copy_s=self.copy_s,
            exposed_s=self.exposed_s,
            free_bytes=(*self._free_before, *self._free_bytes()),
            residue=self._residue(),
        )

    def _mapped_bytes(self) -> dict[str, int]:
        return {region.tag: region.mapped_bytes for region in self._regions}

    def _free_bytes(self) -> tuple[int, ...]:
        if self._device.type != "cuda":
            return ()
        return (torch.cuda.mem_get_info(self._device)[0],)

    def _residue(self) -> dict[str, int]:
        """Return what is in use on the GPU besides mapped regions of this role, by class.

        `outside` are contexts, graphs, communicators, and slabs and regions of other roles.
        """
        if self._device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info(self._device)
        torch_bytes = sum(one.num_bytes for one in self._regions if isinstance(one, TorchRegion))
        active = max(torch.cuda.memory_allocated(self._device) - torch_bytes, 0)
        cached = torch.cuda.memory_reserved(self._device) - torch_bytes - active
        own = sum(region.mapped_bytes for region in self._regions)
        return {
            "torch": active,
            "torch_cache": max(cached, 0),
            "outside": max(total - free - own - active - max(cached, 0), 0),
        }
