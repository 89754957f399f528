"""Algorithm: how graded groups become a batch with advantages, and the loss that learns from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from spmd_rl.algo.losses import Loss, Needs
from spmd_rl.algo.packing import AdvantageOf, Aggregation, pack
from spmd_rl.types.batch import Batch
from spmd_rl.types.groups import Group
from spmd_rl.types.samples import NO_VERSION

Advantage = Callable[[list[Group]], Sequence[NDArray[np.floating]]]

ENTROPY = "entropy"
REFERENCE_LOGPROBS = "reference_logprobs"  # the column that a KL term reads
OLD_LOGPROBS = "old_logprobs"  # the column that takes the place of a trainer's scoring pass
VALUES = "values"


@dataclass(frozen=True)
class Algorithm:
    """A way to learn from graded groups. Each part is a function that also works alone.

    advantage: a number for each sample of each group, from the rewards.
    advantage_of: "tokens" if it is one for each token of these samples.
    credit: a second stage on the whole batch, which gives each token its advantage.
    loss: crosses to the workers, so it is a function of a module, or a partial of one by keywords.
    needs: of "entropy" (with its gradient), "reference_logprobs", "old_logprobs" and "values".
        All but the first are columns of the batch that `credit` or the loss reads.
    keeps: whether a group is learned from; all are if it would keep none.
    mask_truncated: whether samples that were cut have weight 0. They stay in the baseline.
    max_response_tokens: what the aggregation "const" divides by.
    """

    advantage: Advantage
    loss: Loss
    aggregation: Aggregation = "token"
    credit: Callable[[Batch], Batch] | None = None
    needs: frozenset[str] = frozenset()
    keeps: Callable[[Group], bool] | None = None
    mask_truncated: bool = False
    max_response_tokens: int | None = None
    advantage_of: AdvantageOf = "samples"

    @property
    def loss_needs(self) -> Needs:
        """What the forward pass computes for the loss beyond log-probs."""
        return Needs(entropy=ENTROPY in self.needs)

    def kept(self, groups: list[Group]) -> list[Group]:
        """Return the groups that are learned from: all if `keeps` would leave none."""
        if self.keeps is None:
            return groups
        return [group for group in groups if self.keeps(group)] or groups

    def pack(self, groups: list[Group]) -> Batch:
        """Return the groups as a batch with the advantages of the first stage.

        Raises: ContractError, DataError, ConfigError, as `pack` and `advantage` do.
        """
        groups = self.kept(groups)
        batch = pack(
            groups,
            self.advantage(groups),
            aggregation=self.aggregation,
            max_response_tokens=self.max_response_tokens,
            advantages_of=self.advantage_of,
        )
        return without_truncated(batch, groups) if self.mask_truncated else batch


def without_truncated(batch: Batch, groups: list[Group]) -> Batch:
    """Return the batch of these groups in which samples cut at the length limit have weight 0.

    The denominator stays, so that the other samples weigh what they did. Their advantages are still
    taken against the rewards of all samples.
    """
    statuses = Group.to_columns(groups).samples.status
    ended = np.array([status != "truncated" for status in statuses])
    return replace(batch, weight=batch.weight * np.repeat(ended, batch.lengths))


def without_old_tokens(
    groups: list[Group], version: int, max_lag: int
) -> tuple[list[Group], float]:
    """Return the groups with only those tokens in the mask that weights up to `max_lag` versions
    before `version` have drawn, and the share of the mask that this leaves out.

    The others stay where they are, as context. The groups that were passed keep their masks.
    """
    columns = Group.to_columns(groups)
    samples = columns.samples
    mask = np.asarray(samples.filled("mask"))
    old = mask & (samples.versions != NO_VERSION) & (samples.versions < version - max_lag)
    if not old.any():
        return groups, 0.0
    learned = replace(columns, samples=replace(samples, mask=mask & ~old))
    return learned.rows(), float(old.sum() / mask.sum())


def rewards_differ(group: Group) -> bool:
    """Return whether the samples of a group have different rewards."""
    rewards = group.rewards
    return len(rewards) > 0 and bool((rewards != rewards[0]).any())
