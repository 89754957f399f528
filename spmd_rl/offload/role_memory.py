"""RoleMemory: the memory of one role on one rank, as far as the role's phases let it sleep."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import count

import torch
from torch import Tensor

from spmd_rl.errors import ResidencyError
from spmd_rl.offload.phases import RoleSleep
from spmd_rl.offload.region import Contents, SlabRegion, TorchRegion, segment_bytes
from spmd_rl.offload.regions import Regions
from spmd_rl.offload.residency import Receipt

_NUMBERS = count(1)  # of roles that no phase names


class RoleMemory:
    """The regions of one role, by tag. The rank's main thread alone uses it.

    Without `sleep` no phase puts the role to sleep: what torch allocates then is in no region,
    unless the role itself puts it to sleep. A tag without a region is always awake. Slabs are
    regions in any case.
    """

    def __init__(self, sleep: RoleSleep | None, device: torch.device) -> None:
        self._sleep = sleep
        self._device = device
        # names of regions are unique in a process
        name = sleep.role if sleep else f"role-{next(_NUMBERS)}"
        host_bytes = sleep.host_bytes if sleep else 0
        self._regions = Regions(name, device, host_bytes)
        self._dropped: set[str] = set()  # tags whose contents another role brings back
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def sleeps(self) -> bool:
        """Whether some phase puts the role to sleep."""
        return self._sleep is not None

    def allocating(
        self, tag: str, sizes: Iterable[int] = (), always: bool = False
    ) -> AbstractContextManager[None]:
        """Have what torch allocates inside sleep under `tag`, if some phase lets it, or `always`.

        `sizes` are the bytes of the tensors that come, as far as they are known: large ones then
        lie in one segment, which sleeps faster than many.
        Raises: ConfigError on a GPU where torch_memory_saver is missing; ResidencyError where too
        little memory is left for `sizes`.
        """
        if not always and (self._sleep is None or not self._sleep.may_sleep(tag)):
            return nullcontext()
        return self._regions.torch_region(tag, "save").allocating(segment_bytes(sizes))

    def hold(self, tag: str, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """Have the bytes of these tensors, the same at each call, survive a sleep of `tag`."""
        if tag in self._regions:
            region = self._regions[tag]
            assert isinstance(region, TorchRegion)
            region.hold(tensors)

    def reserve(self, num_bytes: int) -> Tensor:
        """Return new host memory, zero and pinned on a GPU. Raises: as `HostArena.reserve`."""
        return self._regions.reserve(num_bytes)

    def reserve_saves(self) -> None:
        """Take host memory for all contents that a sleep saves, before the first one.

        Blocks, raises: as `Regions.reserve_saves`.
        """
        self._regions.reserve_saves()

    def slab(self, tag: str, contents: Contents, num_bytes: int) -> SlabRegion:
        """Return memory of that size. Raises: ResidencyError where too little is left."""
        return self._regions.slab(tag, "drop" if tag in self._dropped else contents, num_bytes)

    def drop(self, tag: str) -> None:
        """Have contents under `tag` end with a sleep: a push will bring others."""
        self._dropped.add(tag)
        if tag in self._regions:
            self._regions[tag].contents = "drop"

    def is_awake(self, tag: str) -> bool:
        """Whether memory under `tag` is mapped, perhaps with bytes still on their way."""
        return tag not in self._regions or self._regions[tag].residency.is_mapped

    def is_lost(self, tag: str) -> bool:
        """Whether the contents under `tag` have ended with a sleep."""
        return not self.is_awake(tag) and self._regions[tag].contents == "drop"

    def require(self, what: str, *tags: str) -> None:
        """Have later work of this stream wait for the contents of these tags.

        Raises: ResidencyError while one sleeps. It says which phases have it awake; `what` is what
        needs it.
        """
        self.require_soon(what, *tags)
        for tag in tags:
            self._wait_loaded(tag)

    def require_soon(self, what: str, *tags: str) -> None:
        """Raise as `require`, and wait for nothing."""
        for tag in tags:
            if not self.is_awake(tag):
                phases = ", ".join(self._sleep.phases_with(tag)) if self._sleep else ""
                role = self._sleep.role if self._sleep else "the role"
                raise ResidencyError(
                    f"{what} needs memory '{tag}' of {role}, which sleeps: call it in a phase "
                    f"that has it awake ({phases or 'name the role in awake=[...]'})"
                )

    def note_change(self, *tags: str) -> None:
        """Note that contents of these tags change, so that a copy on the host is old.

        Blocks: until a save in the background has read them.
        """
        for tag in tags:
            if tag in self._regions:
                self._wait_loaded(tag)
                self._regions.note_change(tag)

    def begin_save(self, *tags: str) -> None:
        """Start to copy contents to the host: they are final until their next change.

        Raises: ResidencyError where the host has no room.
        """
        self._regions.begin_save(tags)

    def sleep(self, tags: tuple[str, ...] = ()) -> list[Receipt]:
        """Give memory back: of these tags, or of all. Raises: as `Regions.sleep`."""
        return [self._regions.sleep(tags or None)]

    def wake(
        self, tags: tuple[str, ...] = (), in_background: tuple[str, ...] = ()
    ) -> list[Receipt]:
        """Take memory again; contents of `in_background` come until `require`.

        Raises: as `Regions.wake`.
        """
        return [self._regions.wake(tags or None, in_background)]

    def take_waited_s(self) -> float:
        """Return how long the GPU has waited in `require` for contents since the last call.

        Blocks: until it has got them.
        """
        waits, self._waits = self._waits, []
        for _, ended in waits:
            ended.synchronize()
        return sum(began.elapsed_time(ended) for began, ended in waits) / 1e3

    def _wait_loaded(self, tag: str) -> None:
        """Have later work of this stream wait for contents that are on their way."""
        if tag not in self._regions or self._regions[tag].residency.state != "loading":
            return
        if self._device.type != "cuda":
            self._regions.wait_loaded(tag)
            return
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        self._regions.wait_loaded(tag)
        ended.record()
        self._waits.append((began, ended))
