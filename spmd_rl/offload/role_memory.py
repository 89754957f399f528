"""RoleMemory: the memory of one role on one rank, which sleeps and wakes by tag."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from spmd_rl.errors import ResidencyError
from spmd_rl.offload.phases import RoleSleep
from spmd_rl.offload.residency import Receipt


class FakeRegion:
    def __init__(self, tag, contents):
        self.tag, self.contents = tag, contents
        self.tensors = list
        self.saved = None
        self.asleep = False
        self.bytes = None

    def sleep(self):
        if self.asleep:
            return
        self.asleep = True
        held = [self.bytes] if self.bytes is not None else list(self.tensors())
        self.saved = [t.detach().clone() for t in held] if self.contents == "save" else None
        for t in held:
            with torch.no_grad():
                t.detach().view(torch.uint8).fill_(255) if t.dim() else t.fill_(float("nan"))

    def wake(self):
        if not self.asleep:
            return
        self.asleep = False
        held = [self.bytes] if self.bytes is not None else list(self.tensors())
        if self.saved is not None:
            with torch.no_grad():
                for t, s in zip(held, self.saved):
                    t.copy_(s)


class RoleMemory:
    def __init__(self, sleep: RoleSleep | None, device: torch.device) -> None:
        self._sleep = sleep
        self._on_gpu = device.type == "cuda"
        self.regions = {}

    @property
    def sleeps(self) -> bool:
        return self._sleep is not None

    def allocating(self, tag: str, always: bool = False) -> AbstractContextManager[None]:
        if self.sleeps or always:
            self.regions[tag] = FakeRegion(tag, "save")
        return nullcontext()

    def hold(self, tag: str, tensors: Callable[[], Iterable[Tensor]]) -> None:
        if tag in self.regions:
            self.regions[tag].tensors = tensors

    def reserve(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._on_gpu)

    def slab(self, tag, contents, num_bytes):
        self.regions[tag] = r = FakeRegion(tag, contents)
        r.bytes = torch.zeros(num_bytes, dtype=torch.uint8)
        return r

    def drop(self, tag):
        if tag in self.regions:
            self.regions[tag].contents = "drop"

    def is_awake(self, tag):
        return tag not in self.regions or not self.regions[tag].asleep

    def is_dropped(self, tag):
        return not self.is_awake(tag) and self.regions[tag].contents == "drop"

    def require(self, what: str, *tags: str) -> None:
        for tag in tags:
            if not self.is_awake(tag):
                phases = self._sleep.phases_with(tag) if self._sleep else []
                raise ResidencyError(
                    f"{what} needs memory '{tag}' of {self._sleep.role}, which sleeps: "
                    f"call it in a phase that has it awake ({', '.join(phases)})"
                )

    require_soon = require

    def note_change(self, *tags: str) -> None: ...

    def sleep(self, tags=()) -> list[Receipt]:
        for tag in tags or self.regions:
            if tag in self.regions:
                self.regions[tag].sleep()
        return [Receipt()]

    def wake(self, tags=(), in_background=()) -> list[Receipt]:
        for tag in tags or self.regions:
            if tag in self.regions:
                self.regions[tag].wake()
        return [Receipt()]
