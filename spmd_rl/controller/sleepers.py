"""Sleepers: which memory of which role is awake, and how a phase changes that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from spmd_rl.controller.capabilities import Sleeper
from spmd_rl.controller.handle import Handle
from spmd_rl.mesh.split import Placement, disjoint
from spmd_rl.offload.phases import ALL, CONCURRENT, Phases, RoleSleep, Tags
from spmd_rl.offload.residency import Receipt

Timed = Callable[[str], AbstractContextManager[None]]
OnReceipts = Callable[[str, str, Sequence[Receipt]], None]


@dataclass(frozen=True)
class SleepPolicy:
    """Whether roles of this run sleep at all, in which phases, and how much they keep in host
    memory.

    `host_bytes` bounds the copies of a rank; 0 stands for what the rank's cgroup leaves.
    """

    sleeps: bool = True
    phases: Phases = CONCURRENT
    host_bytes: int = 0


class Sleepers:
    """The roles of a run that can sleep. All are awake at first.

    `timed` times what runs inside under a name. `on_receipts` is given what each role did: "sleep"
    or "wake", its name, and a receipt of each of its ranks.
    """

    def __init__(self, policy: SleepPolicy, timed: Timed, on_receipts: OnReceipts) -> None:
        self.policy = policy
        self._timed = timed
        self._on_receipts = on_receipts
        self._handles: list[Handle] = []
        self._awake: dict[str, set[str]] = {}  # tags by the name of a sleeper

    def add(self, handle: Handle) -> None:
        """Note a role that was spawned."""
        self._handles.append(handle)
        if Sleeper in handle.capabilities:
            self._awake[handle.name] = set(handle.memory_tags)

    def role_sleep(self, name: str) -> RoleSleep | None:
        """Return what a role is told of its sleep; None where its memory stays awake."""
        phases = self.policy.phases
        if not self.policy.sleeps or name not in phases.roles:
            return None
        awake = {phase: roles.get(name, ()) for phase, roles in phases.awake.items()}
        return RoleSleep(name, awake, self.policy.host_bytes)

    def make_room(self, placement: Placement) -> None:
        """Put to sleep what some phase lets sleep on these ranks, before another role is built."""
        named = self.policy.phases.roles
        self._apply(
            {
                handle: self._always_awake(handle)
                for handle in self._sleepers()
                if handle.name in named and not disjoint(handle.placement, placement)
            }
        )

    def enter(self, phase: str) -> None:
        """Put to sleep what the declaration lets sleep in `phase`, then wake what it needs.

        In a phase that is not declared, all stays as it is.
        """
        awake = self.policy.phases.awake.get(phase)
        if awake is None:
            return
        wanted = {}
        for handle in self._sleepers():
            if handle.name in self.policy.phases.roles:
                tags = _tags(handle, awake.get(handle.name, ()))
                has_company = any(
                    not disjoint(handle.placement, other.placement)
                    for other in self._handles
                    if other is not handle and awake.get(other.name)
                )
                wanted[handle] = tags if has_company else tags | self._awake[handle.name]
        self._apply(wanted)

    def wake_only(self, awake: Sequence[Handle]) -> None:
        """Wake all memory of these roles; put those to sleep first that share ranks with them."""
        wanted = {}
        for handle in self._sleepers():
            if handle in awake:
                wanted[handle] = set(handle.memory_tags)
            elif any(not disjoint(handle.placement, other.placement) for other in awake):
                wanted[handle] = set()
        self._apply(wanted)

    def wake_for_checkpoint(self, handles: Sequence[Handle]) -> None:
        """Wake the roles that a checkpoint is made of, if one of them has memory asleep."""
        for handle in self._sleepers():
            if handle in handles and self._awake[handle.name] < set(handle.memory_tags):
                self.wake_only(handles)

    def _sleepers(self) -> Iterable[Handle]:
        if not self.policy.sleeps:
            return ()
        return [handle for handle in self._handles if handle.name in self._awake]

    def _always_awake(self, handle: Handle) -> set[str]:
        """Return the tags of a role that every phase keeps awake."""
        phases = self.policy.phases.awake.values()
        return set.intersection(*(_tags(handle, awake.get(handle.name, ())) for awake in phases))

    def _apply(self, wanted: dict[Handle, set[str]]) -> None:
        """Give each role the tags that are to be awake: all that sleep go before all that wake."""
        sleeping = {role: self._awake[role.name] - tags for role, tags in wanted.items()}
        waking = {role: tags - self._awake[role.name] for role, tags in wanted.items()}
        self._call("sleep", sleeping)
        self._call("wake", waking)

    def _call(self, what: str, tags_of: dict[Handle, set[str]]) -> None:
        """Have the roles put these tags to sleep, or wake them. Roles of other ranks do it beside.

        Blocks: until all have. Raises: ResidencyError when one could not.
        """
        tags_of = {handle: tags for handle, tags in tags_of.items() if tags}
        if not tags_of:
            return
        with self._timed(what):
            calls = [(role, _start(role, what, tags)) for role, tags in tags_of.items()]
            for handle, call in calls:
                receipts = call.wait()
                self._awake[handle.name] ^= tags_of[handle]  # these tags change sides
                if receipts:
                    self._on_receipts(what, handle.name, receipts)


def _tags(handle: Handle, awake: Tags) -> set[str]:
    """Return which of a role's tags a phase names. A role without tags is awake as a whole."""
    everything = set(handle.memory_tags)
    if handle.memory_tags == ALL:
        return everything if awake else set()
    return everything if set(ALL) & set(awake) else everything & set(awake)


def _start(handle: Handle, what: str, tags: set[str]) -> Any:
    """Begin the call; a role whose method takes no tags sleeps as a whole."""
    endpoint = handle.endpoints[what]
    if handle.memory_tags == ALL:
        return endpoint.start()
    return endpoint.start(tuple(tag for tag in handle.memory_tags if tag in tags))
