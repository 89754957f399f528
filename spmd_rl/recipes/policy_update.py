"""Policy update of a recipe: graded groups become one train step of the chosen algorithm."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import numpy as np

from spmd_rl.algo.algorithm import (
    OLD_LOGPROBS,
    REFERENCE_LOGPROBS,
    VALUES,
    without_old_tokens,
)
from spmd_rl.algo.config import KlConfig
from spmd_rl.algo.credit import mean_k1
from spmd_rl.algo.self_check import check_reference
from spmd_rl.algo.value_loss import value_loss
from spmd_rl.config.combinations import refuse
from spmd_rl.config.dump import as_data
from spmd_rl.controller.controller import Controller
from spmd_rl.controller.link import Link
from spmd_rl.environments.failures import refuse_failures
from spmd_rl.errors import ContractError
from spmd_rl.hooks.context import Keep
from spmd_rl.hooks.controller_hooks import KeepGroup
from spmd_rl.mesh.split import Placements, PolicySplit
from spmd_rl.plan.combinations import BASE_STAYS, REFERENCE_REFUSED
from spmd_rl.recipes.configs import PolicyRecipe
from spmd_rl.rollout.kinds import kind_of
from spmd_rl.train.extra_role import REFERENCE, ExtraRole, reference_roles
from spmd_rl.train.frozen import FrozenModel
from spmd_rl.train.trainer import Trainer
from spmd_rl.train.training_role import TrainingRole
from spmd_rl.train.value_trainer import Critic
from spmd_rl.types.batch import Batch
from spmd_rl.types.groups import Group

MASKED_SHARE = "version/masked_share"
CRITIC = "critic"  # name of the role, and of its ranks in a split


def check_pushes(cfg: PolicyRecipe) -> None:
    """Raise a ConfigError for adapters, or weights in few bits, that a push cannot bring."""
    refuse(kind_of(cfg.engine).refused, {"trainer": {"lora": cfg.trainer.lora}})
    refuse(REFERENCE_REFUSED, cfg)


def extra_roles_of(cfg: PolicyRecipe) -> list[ExtraRole]:
    """Return the roles that a recipe's algorithm needs besides its trainer and its engine."""
    needs, roles = cfg.made_algorithm.needs, list[ExtraRole]()
    if REFERENCE_LOGPROBS in needs:
        roles += reference_roles(
            cfg.trainer,
            cfg.model,
            cfg.kl.reference,
            is_refreshed=cfg.kl.refresh_every > 0,
            has_own_ranks=isinstance(cfg.split, PolicySplit) and cfg.split.reference.ranks != "",
        )
    if VALUES in needs:
        roles.append(ExtraRole(CRITIC, cfg.critic, cfg.model))
    return roles


class PolicyUpdate:
    """The algorithm of a recipe at work: its settings, and the roles that it needs.

    A reference model and a critic are spawned if the algorithm needs them: on ranks of their own if
    `roles` has some for them, else on the trainer's. Where adapters learn, the reference is the
    trainer's base (train/extra_role.py). Roles take memory, so make this before the engine.
    `keep_group` names the hook that leaves groups out, if there is one. `savers` names what a
    checkpoint must hold, and `roles` are those that `step` calls.
    """

    def __init__(
        self,
        ctl: Controller,
        cfg: PolicyRecipe,
        trainer: Trainer,
        roles: Placements,
        *,
        keep_group: str = "",
    ) -> None:
        self.algorithm = cfg.made_algorithm
        self.trainer = trainer
        self._agent = cfg.agent
        self._mask_lag = cfg.mask_lag
        self._keep_group: KeepGroup | None = None
        if keep_group:
            self._keep_group = KeepGroup(keep_group, as_data(cfg), cfg.run.seed)
        spawned = {
            role.name: ctl.spawn(
                role.role_class,
                role.cfg,
                on=role.placement(roles),
                model=role.model,
                name=role.name,
            )
            for role in extra_roles_of(cfg)
        }
        self.savers: dict[str, Any] = spawned
        self.roles = [trainer, *spawned.values()]
        self._reference: _Reference | None = None
        if REFERENCE_LOGPROBS in self.algorithm.needs:
            frozen = cast(FrozenModel | None, spawned.get(REFERENCE))
            begins_as_policy = not cfg.kl.reference and not cfg.trainer.lora.folder
            self._reference = _Reference(ctl, cfg.kl, trainer, frozen, begins_as_policy)
        self._critic = cast(Critic | None, spawned.get(CRITIC))
        self._value_loss = partial(value_loss, clip=cfg.value_clip)
        self._warmup_steps = cfg.critic_warmup_steps if self._critic else 0

    @property
    def trainers(self) -> list[TrainingRole]:
        """The roles that learn: the trainer, and the critic if there is one."""
        return [self.trainer, *([self._critic] if self._critic else [])]

    @property
    def may_drop_groups(self) -> bool:
        """Whether `keep` may leave out a group, which another is to replace."""
        return self.algorithm.keeps is not None or self._keep_group is not None

    def keep(self, group: Group) -> Keep:
        """Return whether a group is learned from: the algorithm's word, then that of the hook.

        Raises: DataError when the hook raises, or returns no `Keep`.
        """
        if self.algorithm.keeps is not None and not self.algorithm.keeps(group):
            return Keep(False, "equal_rewards")
        return Keep(True) if self._keep_group is None else self._keep_group(group)

    def refresh_reference(self, version: int) -> None:
        """Give the reference model, if there is one, the weights of the trainer."""
        if self._reference is not None:
            self._reference.refresh(version)

    def step(self, groups: list[Group], index: int) -> dict[str, float]:
        """Learn from the groups of step `index`, and return the metrics.

        Raises: what `Algorithm.pack` and the roles raise; SpmdError when more episodes have failed
        than `agent.max_failed` allows.
        """
        refuse_failures(groups, self._agent)
        metrics: dict[str, float] = {}
        if self._mask_lag is not None:
            groups, metrics[MASKED_SHARE] = without_old_tokens(groups, index, self._mask_lag)
        batch = self.algorithm.pack(groups)
        if self.algorithm.keeps is not None:
            metrics["train/kept_groups"] = len(self.algorithm.kept(groups)) / len(groups)
        if OLD_LOGPROBS in self.algorithm.needs:
            batch = batch.with_columns(old_logprobs=self.trainer.score.call(batch))
        # on ranks of its own the critic works at the same time as the others
        values = self._critic.values.start(batch) if self._critic else None
        if self._reference is not None:
            batch = self._reference.with_logprobs(batch, index)
            metrics["train/kl"] = mean_k1(batch)
        if values is not None:
            batch = batch.with_columns(values=values.wait())
        if self.algorithm.credit is not None:
            batch = self.algorithm.credit(batch)
        learned = self._critic.train_step.start(batch, self._value_loss) if self._critic else None
        if index >= self._warmup_steps:
            loss, needs = self.algorithm.loss, self.algorithm.loss_needs
            metrics |= self.trainer.train_step.call(batch, loss, needs=needs)
        if learned is not None:
            metrics |= critic_metrics(learned.wait(), batch)
        return metrics


class _Reference:
    """The reference model, and when it takes the weights of the policy.

    Without a `role` it is the base of the trainer's adapters.
    """

    def __init__(
        self,
        ctl: Controller,
        cfg: KlConfig,
        trainer: Trainer,
        role: FrozenModel | None,
        begins_as_policy: bool,
    ) -> None:
        self._begins_as_policy = begins_as_policy
        self._score = role.score if role is not None else trainer.score_base
        self._cfg = cfg
        self._trainer = trainer
        self._make_link = partial(ctl.link, trainer, role) if role is not None else None
        self._link: Link | None = None

    def refresh(self, version: int) -> None:
        """Push the trainer's weights, which are called `version`.

        Raises: ContractError where the reference is the trainer's base.
        """
        if self._make_link is None:
            raise ContractError(f"kl.coef with trainer.lora.rank: {BASE_STAYS}")
        if self._link is None:
            self._link = self._make_link()
        self._link.push(version=version)

    def with_logprobs(self, batch: Batch, index: int) -> Batch:
        """Return the batch with the reference's log-probs, refreshed if step `index` is due.

        Raises: ContractError if the reference is not the policy at the first step, where it must
        be.
        """
        every = self._cfg.refresh_every
        if every and index and index % every == 0:
            self.refresh(index)
        scores = self._score.call(batch)
        if index == 0 and self._begins_as_policy:
            check_reference(self._trainer.score.call(batch), scores)
        return batch.with_columns(reference_logprobs=scores)


def critic_metrics(stats: dict[str, float], batch: Batch) -> dict[str, float]:
    """Return the metrics of a critic's train step on a batch, under names of their own."""
    renamed = {f"critic/{name}": stats[f"train/{name}"] for name in ("loss", "grad_norm", "lr")}
    measured = {name: value for name, value in stats.items() if name.startswith("critic/")}
    return renamed | measured | {"critic/explained_variance": explained_variance(batch)}


def explained_variance(batch: Batch) -> float:
    """Return the share of the returns' variance that the values explain: 1 if they are equal."""
    returns = batch.columns["returns"][batch.mask].astype(np.float64)
    left = returns - batch.columns["values"][batch.mask]
    variance = returns.var()
    return float(1 - left.var() / variance) if variance else 0.0
