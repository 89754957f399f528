"""Queue of groups from their submission to the step that learns from them; no call, no thread.

Let B groups be learned from in each step. Step s, counted from 0, learns at weights of version s.
A group is submitted under version v only while

    (accepted groups, those of earlier steps included) + (running groups) < (max_lag + v + 1) * B

Claim: with `oversample` = 1 and `tail` = "keep", no token is more than `max_lag` versions older
than the weights that learn from it, and no group is generated in vain unless it is rejected.

Proof: Steps take groups in the order of submission, and pass over those that are rejected. So the
groups that are taken before this one are among those that were accepted or running when it was
submitted: fewer than (max_lag + v + 1) * B. It is therefore taken in step max_lag + v at the
latest. None of its tokens is older than version v, whatever is pushed while it runs, or whether it
is aborted and resumed.

With a larger `oversample`, or where a step passes over groups that have not ended, or takes fewer
than B, a group's place can be further back. What step v + max_lag has not taken leaves the queue
then, and its prompt goes back to the data unless it was rejected. This bounds the lag without the
proof.
Source: Fu et al., AReaL (arXiv 2505.24298), staleness-aware training, has the condition.

With `round_tokens` groups are submitted for one step at a time, and all that runs ends with its
round. A step takes whole groups in the order of submission, and passes over others that a later
step may still learn from. At most B groups are left for later steps, because `oversample` is at
most 2. So all that are due in a step have a place in it, and the bound holds there too.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import islice

from spmd_rl.controller.pending import Pending
from spmd_rl.errors import ContractError, SpmdError
from spmd_rl.rollout.sampler_config import SamplerConfig
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample, error_of

NO_SAMPLES = "no_samples"  # why a group is rejected whose samples have all failed
# batches of such groups for one step that end a run which sets no limit: the function is broken
MAX_FAILED_BATCHES = 20


@dataclass(eq=False)
class QueuedGroup:
    """A group that was submitted under the weights of `version`; it runs, or it has ended.

    `partial` are samples that an earlier call of it has left. `rejection` says why nothing is
    learned from it, "" if it was accepted. `rewards` are those of a rejected one, unless it comes
    from a checkpoint.
    """

    prompt: Prompt
    version: int
    partial: list[Sample] = field(default_factory=list)
    call: Pending[Group] | None = None
    group: Group | None = None
    rejection: str = ""
    rewards: list[float] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        return self.group is not None

    @property
    def is_accepted(self) -> bool:
        return self.group is not None and not self.rejection

    def stopped(self, samples: list[Sample] | None) -> QueuedGroup:
        """Return the entry as it is without its call, which has got as far as `samples`."""
        return QueuedGroup(self.prompt, self.version, self.partial if samples is None else samples)


@dataclass(frozen=True)
class TakenGroups:
    """The groups of a step, with what left the queue beside them: how many groups were rejected,
    by reason, those of them that have failed samples, and the groups that are too many or too old,
    whose prompts go back to the data.

    `shortage` is a sentence on the groups that the step lacks, "" if it lacks none. A step that can
    learn from none of them takes none: all groups are surplus then.
    """

    groups: list[Group]
    rejected: Counter[str]
    failed: list[Group]
    surplus: list[QueuedGroup]
    shortage: str = ""


class GroupQueue:
    """Groups in the order of their submission, which is also that of their versions.

    `next_step` is the step that takes groups next, and `version` that of the engine's weights; None
    before the first push.
    """

    def __init__(self, cfg: SamplerConfig, groups_per_step: int) -> None:
        self.next_step = 0
        self.version: int | None = None
        self.entries: list[QueuedGroup] = []
        self.num_running = 0
        self._num_rejected = 0  # of the entries
        self._stopped: deque[QueuedGroup] = deque()  # entries that do not run and have not ended
        self._cfg = cfg
        self._groups_per_step = groups_per_step

    @property
    def num_carried(self) -> int:
        """The groups that were stopped at the end of a round, and go on in another."""
        return sum(bool(entry.partial) and entry.call is None for entry in self.entries)

    @property
    def num_buffered(self) -> int:
        """The groups that were accepted and wait for a step."""
        return sum(entry.is_accepted for entry in self.entries)

    def set_version(self, version: int) -> None:
        """Note that the engine has the weights of `version`.

        Raises: ContractError when they are older than those that it had.
        """
        if self.version is not None and version < self.version:
            raise ContractError(
                f"the sampler cannot go from version {self.version} back to {version}"
            )
        self.version = version

    def num_to_submit(self) -> int:
        """Return how many more prompts may be submitted now, or for the next round."""
        if self.version is None:
            return 0
        num_ahead = 0 if self._cfg.round_tokens else self._cfg.max_lag
        room = num_ahead + self.version + 1 - self.next_step
        wanted = math.ceil(round(room * self._groups_per_step * self._cfg.oversample, 6))
        wanted += self._num_rejected - len(self.entries)
        if self._cfg.round_tokens:
            return max(0, wanted)
        return max(0, min(wanted, self._num_idle() - len(self._stopped)))

    def submit(self, prompts: list[Prompt]) -> None:
        """Append prompts under the present version; `to_start` returns them."""
        assert self.version is not None
        self.restore([QueuedGroup(prompt, self.version) for prompt in prompts])

    def restore(self, entries: list[QueuedGroup]) -> None:
        """Append entries, such as those of a checkpoint, in the order of their submission."""
        self.entries += entries
        if not self._cfg.round_tokens:
            self._stopped += [entry for entry in entries if not entry.has_ended]
        self._num_rejected += sum(bool(entry.rejection) for entry in entries)

    @property
    def in_round(self) -> bool:
        """Whether a group has yet to draw the tokens of this round."""
        return bool(self.num_running or self._stopped)

    def begin_round(self) -> None:
        """Let `to_start` return all groups that have not ended. Called between rounds."""
        self._stopped += [entry for entry in self.entries if not entry.has_ended]

    def pause(self, entry: QueuedGroup, samples: list[Sample]) -> None:
        """Note that the call of a group has ended with its round, and has come to `samples`."""
        entry.partial, entry.call = samples, None
        self.num_running -= 1

    def to_start(self) -> list[QueuedGroup]:
        """Return the entries that may start now, which `start` then has to be called with."""
        if self.version is None:
            return []
        return list(islice(self._stopped, max(0, self._num_idle())))

    def start(self, entry: QueuedGroup, call: Pending[Group]) -> None:
        """Note that `entry`, the first of `to_start`, runs as `call`."""
        self._stopped.remove(entry)
        entry.call = call
        self.num_running += 1

    def end(self, entry: QueuedGroup, group: Group, rejection: str = "") -> None:
        """Note that a group that ran has ended, and why it was rejected if it was."""
        # of a rejected one, what failed is shown, and the rest is only counted
        entry.group = Group(entry.prompt, [], group.failed) if rejection else group
        entry.rewards = [*filter(math.isfinite, group.rewards)] if rejection else []
        entry.rejection, entry.call = rejection, None
        entry.partial = []
        self.num_running -= 1
        self._num_rejected += bool(rejection)

    def take(self, step: int) -> TakenGroups | None:
        """Remove and return what step `step` learns from; None while too few groups have ended.

        Where more groups were rejected for it than `max_gen_batches` allows, `when_short` says what
        is returned. In the first step of a run, and where groups have no samples, it is an error:
        no group has taught anything yet, or a function is broken.
        Raises: ContractError when no push was late enough for this step; SpmdError for too many
        rejected groups.
        """
        self._require_reachable(step)
        self.next_step = step
        if self._cfg.round_tokens and self.in_round:
            return None
        accepted, rejected, num_seen = self._in_turn()
        shortage = ""
        if len(accepted) < self._groups_per_step:
            if not self._is_hopeless(len(accepted), rejected):
                return None
            shortage = self._shortage(len(accepted), rejected)
            if self._cfg.when_short == "stop" or not accepted:
                return self._nothing(rejected, shortage)
        self.next_step = step + 1
        taken = {id(entry) for entry in accepted}
        gone = [
            entry
            for number, entry in enumerate(self.entries)
            if self._is_due(entry) or (entry.rejection and number < num_seen)
        ]
        dropped = [entry for entry in gone if entry.rejection]
        surplus = [entry for entry in gone if not entry.rejection and id(entry) not in taken]
        self._drop([*accepted, *gone])
        return TakenGroups(
            [entry.group for entry in accepted if entry.group is not None],
            Counter(entry.rejection for entry in dropped),
            [entry.group for entry in dropped if entry.group is not None and entry.group.failed],
            surplus,
            shortage,
        )

    def num_missing(self, taken: TakenGroups) -> int:
        """Return how many groups a step lacks."""
        return self._groups_per_step - len(taken.groups)

    @property
    def last_failure(self) -> str:
        """Why a sample of the last group failed that has a failed one; "" if there is none."""
        for entry in reversed(self.entries):
            if entry.group is not None and entry.group.failed:
                return error_of(entry.group.failed[-1])
        return ""

    def _drop(self, entries: list[QueuedGroup]) -> None:
        """Remove these entries."""
        gone = {id(entry) for entry in entries}
        self.entries = [entry for entry in self.entries if id(entry) not in gone]
        self.num_running = sum(entry.call is not None for entry in self.entries)
        self._num_rejected = sum(bool(entry.rejection) for entry in self.entries)
        self._stopped = deque(entry for entry in self._stopped if id(entry) not in gone)

    def _nothing(self, rejected: Counter[str], shortage: str) -> TakenGroups:
        """Remove all entries, of which no step learns; their prompts go back to the data."""
        surplus = self.entries
        self._drop(surplus)
        return TakenGroups([], rejected, [], surplus, shortage)

    def _in_turn(self) -> tuple[list[QueuedGroup], Counter[str], int]:
        """Return the first groups that were accepted, up to a step's number of them, how many among
        them were rejected, by reason, and how many entries that took.

        It looks at no more groups than a step may have, whatever else has ended.
        """
        accepted: list[QueuedGroup] = []
        rejected: Counter[str] = Counter()
        num_seen = 0
        limit = self._cfg.max_gen_batches * self._groups_per_step or sys.maxsize
        for number, entry in enumerate(self.entries):
            if len(accepted) == self._groups_per_step or len(accepted) + rejected.total() == limit:
                break
            if not entry.has_ended:
                if self._is_awaited(entry):
                    break
                continue
            num_seen = number + 1
            if entry.rejection:
                rejected[entry.rejection] += 1
            else:
                accepted.append(entry)
        return accepted, rejected, num_seen

    def _is_awaited(self, entry: QueuedGroup) -> bool:
        """Whether a step waits for a group that has not ended."""
        if self._cfg.round_tokens:
            return entry.version + self._cfg.max_lag <= self.next_step
        return self._cfg.tail == "keep"

    def _is_due(self, entry: QueuedGroup) -> bool:
        """Whether the last step that may learn from a group has taken what it takes."""
        return entry.version + self._cfg.max_lag < self.next_step

    def _num_idle(self) -> int:
        """Return how many more groups may run."""
        return (self._cfg.max_running or sys.maxsize) - self.num_running

    def _require_reachable(self, step: int) -> None:
        if self.version is None or step - self.version > self._cfg.max_lag:
            pushed = "nothing" if self.version is None else f"version {self.version}"
            raise ContractError(
                f"the sampler cannot serve version {step} of the trainer: {pushed} was pushed "
                f"last, and max_lag is {self._cfg.max_lag}"
            )

    def _is_hopeless(self, num_accepted: int, rejected: Counter[str]) -> bool:
        """Whether a step has had as many groups as it may have."""
        num_ended = num_accepted + rejected.total()
        limit = self._cfg.max_gen_batches
        if not limit and num_ended == rejected[NO_SAMPLES]:
            limit = MAX_FAILED_BATCHES
        return bool(limit) and num_ended >= limit * self._groups_per_step

    def _shortage(self, num_accepted: int, rejected: Counter[str]) -> str:
        """Return a sentence on the groups that a step lacks. Raises: SpmdError where it fails."""
        num_rejected, step = rejected.total(), self.next_step
        reasons = ", ".join(f"{count} by {reason}" for reason, count in rejected.most_common())
        told = (
            f"step {step + 1} needs {self._groups_per_step} groups, but of "
            f"{num_accepted + num_rejected} only {num_accepted} were accepted ({reasons}"
        )
        is_broken = 2 * rejected[NO_SAMPLES] > num_rejected
        if is_broken or not step or self._cfg.when_short == "error":
            if rejected[NO_SAMPLES] and (failure := self.last_failure):
                raise SpmdError(f"{told} rejected): {failure}")
            raise SpmdError(
                f"{told} rejected): choose other prompts or another filter, or raise "
                "sampler.max_gen_batches"
            )
        rewards = [reward for entry in self.entries for reward in entry.rewards]
        mean = f", with a mean reward of {sum(rewards) / len(rewards):.2f}" if rewards else ""
        return f"{told} rejected{mean})"
