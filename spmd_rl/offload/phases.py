"""Phases of a recipe: which memory of which role is awake in each of them. Pure, no torch.

A recipe declares them once, as `phases: ClassVar[rl.Phases]` of its `Config`. The controller reads
the declaration to put roles to sleep and to wake them, and the plan to count memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Tags = tuple[str, ...]
ALL: Tags = ("*",)  # all memory of a role, whatever its tags are


@dataclass(frozen=True)
class Phases:
    """Which roles are awake in each phase, and with which tags of their memory.

    `awake` goes by the name of a phase and the name of a role, as `spawn` names it. A role that a
    phase does not name sleeps in it, if another role of its ranks is awake there. A role that no
    phase names is always awake. Without any phase, all roles are.
    """

    awake: Mapping[str, Mapping[str, Tags]] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The declared phases, in their order."""
        return tuple(self.awake)

    @property
    def roles(self) -> frozenset[str]:
        """The roles that some phase names, but for those that are awake as a whole in every phase.

        No other role ever sleeps.
        """
        named = {role for roles in self.awake.values() for role in roles}
        return frozenset(
            role
            for role in named
            if any(not set(ALL) & set(roles.get(role, ())) for roles in self.awake.values())
        )

    def is_awake(self, phase: str, role: str, tag: str) -> bool:
        """Return whether memory under `tag` of `role` is awake in `phase`.

        In a phase that is not declared, everything is.
        """
        if phase not in self.awake or role not in self.roles:
            return True
        return bool({tag, *ALL}.intersection(self.awake[phase].get(role, ())))

    def with_roles(self, **awake: Mapping[str, Tags]) -> Phases:
        """Return these phases with more roles awake in some of them.

        `COLOCATED.with_roles(train={"judge": ALL})` adds a role that the train phase needs.
        """
        names = dict.fromkeys((*self.awake, *awake))
        return Phases({name: {**self.awake.get(name, {}), **awake.get(name, {})} for name in names})


@dataclass(frozen=True)
class RoleSleep:
    """What a role is told of its sleep: its name, its tags that are awake in each phase, and the
    bytes that its rank may keep in host memory (0: what the rank's cgroup leaves).
    """

    role: str
    phases: dict[str, Tags]
    host_bytes: int = 0

    def may_sleep(self, tag: str) -> bool:
        """Return whether memory under `tag` sleeps in some phase."""
        return len(self.phases_with(tag)) < len(self.phases)

    def phases_with(self, tag: str) -> list[str]:
        """Return the phases in which memory under `tag` is awake."""
        return [name for name, tags in self.phases.items() if {tag, *ALL}.intersection(tags)]


# all roles are awake in all phases: for recipes whose roles work at the same time
CONCURRENT = Phases()

# a trainer and an engine on the same ranks, which work in turn
COLOCATED = Phases(
    {
        "sync": {"train": ("master", "pushed_base"), "infer": ("weights",)},
        "eval": {"infer": ALL},
        "rollout": {"infer": ALL},
        "train": {"train": ALL, "reference": ALL, "critic": ALL},
    }
)
