"""Files of a sampler in a checkpoint: groups in columns, and everything else as JSON. No pickle.

sampler/
    groups.msgpack   the groups, finished or not, and prompts on their way back to the source
    state.json       step, versions, verdicts, and the state of the source
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from spmd_rl.controller.channel.codec import Codec, Packed
from spmd_rl.errors import ConfigError, ContractError
from spmd_rl.rollout.group_queue import QueuedGroup
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt

GROUPS_FILE = "groups.msgpack"
STATE_FILE = "state.json"

_CODEC = Codec(list[Group], functions=False)


@dataclass(frozen=True)
class SamplerState:
    """What a sampler needs to go on. `leaving` are prompts that `source` does not have back yet."""

    next_step: int
    entries: list[QueuedGroup]
    leaving: list[Prompt]
    source: dict[str, Any]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """What is kept of an entry beside its samples."""

    version: int
    has_ended: bool
    rejection: str


class _StateFile(msgspec.Struct, forbid_unknown_fields=True):
    next_step: int
    entries: list[_Entry]
    source: dict[str, Any]


def write_state(folder: str, state: SamplerState) -> None:
    """Write the files of a state into a new folder."""
    groups = [entry.group or Group(entry.prompt, entry.partial) for entry in state.entries]
    groups += [Group(prompt, []) for prompt in state.leaving]
    entries = [_Entry(entry.version, entry.has_ended, entry.rejection) for entry in state.entries]
    rest = _StateFile(state.next_step, entries, state.source)
    Path(folder).mkdir(parents=True)
    (Path(folder) / GROUPS_FILE).write_bytes(msgspec.msgpack.encode(_CODEC.pack(groups)))
    text = msgspec.json.format(msgspec.json.encode(rest)) + b"\n"
    (Path(folder) / STATE_FILE).write_bytes(text)


def read_state(folder: str) -> SamplerState:
    """Read what `write_state` wrote. Raises: ConfigError when the files are something else."""
    path = Path(folder)
    try:
        packed = msgspec.msgpack.decode((path / GROUPS_FILE).read_bytes(), type=Packed)
        groups: list[Group] = _CODEC.unpack(packed)
        rest = msgspec.json.decode((path / STATE_FILE).read_bytes(), type=_StateFile)
    except (OSError, msgspec.MsgspecError, ContractError) as error:
        raise ConfigError(f"{folder} does not hold what a sampler has saved: {error}") from error
    if len(groups) < len(rest.entries):
        raise ConfigError(f"{folder} has {len(groups)} groups for {len(rest.entries)} entries")
    entries = [_restored(*pair) for pair in zip(rest.entries, groups, strict=False)]
    leaving = [group.prompt for group in groups[len(entries) :]]
    return SamplerState(rest.next_step, entries, leaving, rest.source)


def _restored(entry: _Entry, group: Group) -> QueuedGroup:
    if entry.has_ended:
        return QueuedGroup(group.prompt, entry.version, group=group, rejection=entry.rejection)
    return QueuedGroup(group.prompt, entry.version, partial=group.samples)
