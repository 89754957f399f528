"""Learner: the train step above any backend.

    batch shard -> minibatches -> micro-batches -> log-probs -> loss -> gradients -> checks -> step

A minibatch is what one optimizer step learns from. With one of them, the old log-probs are the new
ones, detached. With more, a scoring pass over the batch finds the old ones before the first step.
Either way they are those of the weights as they were pushed, and on_policy.py compares them, bit
for bit, with what the engine recorded.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.algo.algorithm import OLD_LOGPROBS
from spmd_rl.algo.losses import Loss, LossInput, Needs, ValueInput, checked
from spmd_rl.errors import ContractError, SpmdError
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.train.backend import Backend, Outputs
from spmd_rl.train.batch_runner import NOTHING_ELSE, BatchRunner, logprobs_of
from spmd_rl.train.checkpoint.trainer_state import TrainerState
from spmd_rl.train.config import TrainerConfig, learning_rate
from spmd_rl.train.cost.flops import peak_flops
from spmd_rl.train.expert_metrics import LoadTally
from spmd_rl.train.fsdp2.determinism import deterministic
from spmd_rl.train.metric_sums import MetricSums
from spmd_rl.train.microbatch import MicroBatch, split_sequences
from spmd_rl.train.on_policy import (
    MAX_DLOGP,
    TOKEN_COUNT,
    compare_routes,
    compare_with_rollout,
    on_policy_metrics,
)
from spmd_rl.types.batch import Batch

TOKENS = "train/tokens"


class Learner:
    """The algorithm's part of a trainer on one rank. `state` changes with every train step."""

    def __init__(self, backend: Backend, context: RoleContext, cfg: TrainerConfig) -> None:
        self.backend = backend
        self.runner = BatchRunner(backend, context, cfg.max_tokens)
        self.context = context
        self.cfg = cfg
        self.state = TrainerState()

    def train_step(
        self, batch: Batch, loss: Loss, lr: float | None = None, needs: Needs = NOTHING_ELSE
    ) -> dict[str, float]:
        """Learn from this rank's shard, and return the metrics of the whole batch.

        The metrics are equal on all ranks. A minibatch divides by its share of the denominator, so
        that each optimizer step sees a loss of the same scale.
        Ranks: all of the role. Raises: SpmdError on every rank where a loss or gradient is not
        finite, before the optimizer step that would have used it.
        """
        start = time.perf_counter()
        self._loads = LoadTally()
        minibatches = [self.runner.micro_batches(parts) for parts in self._minibatches(batch)]
        scale = len(minibatches) / batch.denominator
        with deterministic(self.cfg.deterministic):
            old_logprobs = self._old_logprobs(minibatches)
            steps_before = self.state.optimizer_steps
            try:
                steps = [
                    self._optimize(micros, old, _Step(loss, needs, scale, lr))
                    for micros, old in zip(minibatches, old_logprobs, strict=True)
                ]
            finally:  # the weights are new even if a later minibatch fails
                self.state.version += self.state.optimizer_steps > steps_before
        of_experts = self._loads.metrics(self.context, len(steps))
        metrics = _metrics(steps, batch.denominator, self.backend.compares_bits)
        return metrics | of_experts | self._speed(batch, start)

    def score(self, batch: Batch) -> NDArray[np.float32]:
        """Return log-probs of this rank's shard under the current weights, zero outside the mask.

        Ranks: all of the role. Shape: [T].
        """
        return self.runner.score_each(batch, logprobs_of)

    def _old_logprobs(self, minibatches: list[list[MicroBatch]]) -> list[list[Tensor | None]]:
        """Return the log-probs under the present weights, where a step changes them before."""
        first, *later = minibatches
        old: list[list[Tensor | None]] = [[None] * len(first)]
        for micros in later:
            scored: list[Tensor | None] = [None] * len(micros)

            def visit(number: int, outputs: Outputs, scored: list[Tensor | None] = scored) -> None:
                scored[number] = outputs.logprobs

            self.backend.forward(micros, visit, NOTHING_ELSE)
            old.append(scored)
        return old

    def _minibatches(self, batch: Batch) -> list[Sequence[Batch]]:
        """Return equally many minibatches on every rank, each as its share of each part of the
        shard. There are at most as many as the largest part has sequences: each has some to learn
        from.
        """
        parts, count = batch.parts(), self.cfg.minibatches
        if self.cfg.data_parts and len(parts) * self.context.data_size != self.cfg.data_parts:
            raise ContractError(
                f"a shard has {len(parts)} parts of the batch, but trainer.data_parts = "
                f"{self.cfg.data_parts}: cut the batch with shard({self.context.data_size}, "
                f"{self.cfg.data_parts})"
            )
        if count > 1:
            most = max(len(part.unit_lengths()) for part in parts)
            count = max(1, min(count, self.context.all_reduce_max(most)))
        split = [_minibatches_of(part, count) for part in parts]
        return list(zip(*split, strict=True))

    def _optimize(
        self, micros: list[MicroBatch], old_logprobs: list[Tensor | None], step: _Step
    ) -> dict[str, float]:
        """Take one optimizer step, and return the sums over the role's ranks."""
        sums = MetricSums()
        balance_scale = self._balance_scale(micros)

        def loss_of(number: int, outputs: Outputs) -> Tensor:
            micro = micros[number]
            out = self._loss_input(micro, outputs, old_logprobs[number], step.needs, sums)
            per_token, measured = checked(step.loss(out), out, step.loss)
            weighted = per_token * micro.weight
            for name, values in {"loss": weighted, **measured}.items():
                sums.add(name, values)
            return weighted.sum() * step.scale + self._balance(outputs, balance_scale)

        self.backend.forward_backward(micros, loss_of, step.needs)
        num_scheduled = self.state.steps_before + self.state.optimizer_steps
        lr = learning_rate(self.cfg, num_scheduled) if step.lr is None else step.lr
        gathered = sums.gather(self.context, square_norm=self.backend.square_norm())
        norm = self._checked_norm(gathered)
        clip = self.cfg.clip_norm
        self.backend.step(lr, clip / norm if 0 < clip < norm else 1.0)
        self.state.optimizer_steps += 1
        totals = {name: float(values.sum()) for name, values in gathered.items()}
        maxima = {name: float(gathered[name].max()) for name in (MAX_DLOGP,) if name in gathered}
        return totals | maxima | {"train/grad_norm": norm, "train/lr": lr}

    def _balance_scale(self, micros: list[MicroBatch]) -> float:
        """Return what a token adds to the weight of its micro-batch in the loss that balances.

        Ranks: all of the role.
        """
        if not self.cfg.router_aux_loss_coef:
            return 0.0
        own = np.array([sum(len(micro.tokens) for micro in micros)], np.float64)
        return float(self.context.shard_size / self.context.all_reduce_sum(own)[0])

    def _balance(self, outputs: Outputs, scale: float) -> Tensor | float:
        """Count the loads of a micro-batch, and return its part of the loss that balances them."""
        if outputs.loads is None:
            return 0.0
        coef = self.cfg.router_aux_loss_coef
        balance = outputs.loads.balance() * (outputs.loads.num_rows * scale) if coef else None
        self._loads.add(outputs.loads, balance, outputs.replay)
        return 0.0 if balance is None else coef * balance

    def _loss_input(
        self,
        micro: MicroBatch,
        outputs: Outputs,
        start_logprobs: Tensor | None,
        needs: Needs,
        sums: MetricSums,
    ) -> LossInput | ValueInput:
        """Return what the loss reads, and add what every step measures to `sums`.

        `start_logprobs` are those at the start of the train step, None where these are.
        """
        split = micro.sequence, micro.num_sequences, micro.columns
        if outputs.logprobs is None or outputs.entropy is None:
            assert outputs.values is not None
            sums.add(TOKEN_COUNT, torch.ones_like(micro.weight))
            return ValueInput(outputs.values, *split)
        if outputs.routes is not None:
            # An optimizer step before has changed the routes.
            is_changed = start_logprobs is not None
            compare_routes(outputs.routes, micro, None if is_changed else self.state.version, sums)
        if start_logprobs is None:
            start_logprobs = outputs.logprobs.detach()
        sums.add("train/entropy", outputs.entropy)
        compare_with_rollout(start_logprobs, micro, self.state.version, sums)
        return LossInput(
            outputs.logprobs,
            micro.columns.get(OLD_LOGPROBS, start_logprobs),
            micro.rollout_logprobs,
            micro.advantages,
            outputs.entropy if needs.entropy else _without_gradient(outputs.entropy),
            *split,
            outputs.candidate_logprobs,
        )

    def _checked_norm(self, gathered: dict[str, NDArray[np.float64]]) -> float:
        """Return the global gradient norm.

        Raises: SpmdError where it or a loss is not finite; the gradients are then discarded.
        """
        placement = self.context.placement
        found = {
            "loss": (gathered["loss"], [ranks[0] for ranks in placement.shards]),
            "gradient": (gathered["square_norm"], list(placement.ranks)),
        }
        for what, (values, ranks_of) in found.items():
            indices = np.flatnonzero(~np.isfinite(values))
            if len(indices):
                self.backend.discard()
                ranks = ", ".join(str(ranks_of[i]) for i in indices)
                raise SpmdError(
                    f"train step {self.state.version}: the {what} is not finite on rank {ranks}; "
                    "that optimizer step was not taken"
                )
        return sqrt(gathered["square_norm"].sum())

    def _speed(self, batch: Batch, start: float) -> dict[str, float]:
        """Return tokens per second; of GPUs also the memory in use, and the MFU where it is known.

        Ranks: all of the role.
        """
        device = self.backend.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # until the optimizer's last step is done
        seconds = time.perf_counter() - start
        flops = self.backend.flops(batch.lengths, int(batch.mask.sum()))
        own = np.array([seconds, batch.num_tokens, flops])
        total_s, *counts = self.context.all_reduce_sum(own)
        # the ranks of a shard share its work
        num_tokens, flops = (count / self.context.shard_size for count in counts)
        speed = {
            TOKENS: float(num_tokens),
            "perf/train_tokens_per_s": float(num_tokens / (total_s / self.context.size)),
        }
        if device.type == "cuda":
            # torch's allocator keeps the memory of the step's peak, so that it is still in use
            free, total = torch.cuda.mem_get_info(device)
            speed["memory/gpu_peak_gib"] = self.context.all_reduce_max(total - free) / 2**30
        if peak := peak_flops(device, self.cfg.dtype):
            speed["perf/mfu"] = float(flops / (total_s * peak))
        return speed


def _minibatches_of(part: Batch, count: int) -> list[Batch]:
    shares = split_sequences(part.unit_lengths().tolist(), count)
    return [part.select(part.sequences_of(share)) for share in shares]


@dataclass(frozen=True)
class _Step:
    """Settings of an optimizer step. `lr` None is the schedule's rate."""

    loss: Loss
    needs: Needs
    scale: float
    lr: float | None


def _without_gradient(entropy: Tensor) -> Tensor:
    """Return the same values, for which a backward pass raises an error.

    Without it, a loss that uses them would silently learn nothing from them. A loss that does not
    use them costs nothing.
    """
    measured = entropy.detach().requires_grad_()
    measured.register_hook(_refuse_gradient)
    return measured


def _refuse_gradient(gradient: Tensor) -> NoReturn:
    raise ContractError(
        "the loss uses out.entropy, which carries no gradient here, so nothing would be learned "
        "from it: call train_step with needs=rl.Needs(entropy=True), or use out.entropy.detach()"
    )


def _metrics(
    steps: list[dict[str, float]], denominator: float, compares_bits: bool
) -> dict[str, float]:
    """Return the metrics of a train step from the sums of its optimizer steps."""
    names = [name for name in steps[0] if name not in (MAX_DLOGP, "square_norm")]
    totals = {name: sum(step[name] for step in steps) for name in names}
    num_tokens = max(totals.pop(TOKEN_COUNT), 1.0)
    metrics = {
        "train/loss": totals.pop("loss") / denominator,
        "train/grad_norm": totals.pop("train/grad_norm") / len(steps),
        "train/lr": totals.pop("train/lr") / len(steps),
        **on_policy_metrics(totals, max(step.get(MAX_DLOGP, 0.0) for step in steps), compares_bits),
    }
    return metrics | {name: value / num_tokens for name, value in totals.items()}
