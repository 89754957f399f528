"""Learner: the train step above any backend.

    batch shard -> minibatches -> micro-batches -> log-probs -> loss -> gradients -> checks -> step

A minibatch is what one optimizer step learns from. With one of them, the old log-probs are the new
ones, detached. With more, a scoring pass over the batch finds the old ones before the first step.
Either way they are those of the weights as they were pushed, and on_policy.py compares them, bit
for bit, with what the engine recorded.
"""

from __future__ import annotations

import time
from math import sqrt
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.algo.losses import Loss, LossInput, checked
from spmd_rl.errors import ContractError, SpmdError
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.train.backend import Backend
from spmd_rl.train.config import TrainerConfig, learning_rate
from spmd_rl.train.determinism import deterministic
from spmd_rl.train.flops import peak_flops
from spmd_rl.train.metric_sums import MetricSums
from spmd_rl.train.microbatch import MicroBatch, lay_out, num_micro_batches, split_sequences
from spmd_rl.train.on_policy import MAX_DLOGP, compare_with_rollout, on_policy_metrics
from spmd_rl.train.trainer_state import TrainerState
from spmd_rl.types.batch import Batch

TOKENS = "train/tokens"


class Learner:
    """The algorithm's part of a trainer on one rank. `state` changes with every train step."""

    def __init__(self, backend: Backend, context: RoleContext, cfg: TrainerConfig) -> None:
        self.backend = backend
        self.context = context
        self.cfg = cfg
        self.state = TrainerState()

    def train_step(self, batch: Batch, loss: Loss, lr: float | None = None) -> dict[str, float]:
        """Learn from this rank's shard, and return the metrics of the whole batch.

        The metrics are equal on all ranks. A minibatch divides by its share of the denominator, so
        that each optimizer step sees a loss of the same scale.
        Ranks: all of the role. Raises: SpmdError on every rank where a loss or gradient is not
        finite, before the optimizer step that would have used it.
        """
        start = time.perf_counter()
        minibatches = [self._micro_batches(part) for part in self._minibatches(batch)]
        scale = len(minibatches) / batch.denominator
        with deterministic(self.cfg.deterministic):
            old_logprobs = [
                [self._logprobs(micro) if number else None for micro in micros]
                for number, micros in enumerate(minibatches)
            ]
            steps_before = self.state.optimizer_steps
            try:
                steps = [
                    self._optimize(micros, old, loss, scale, lr)
                    for micros, old in zip(minibatches, old_logprobs, strict=True)
                ]
            finally:  # the weights are new even if a later minibatch fails
                self.state.version += self.state.optimizer_steps > steps_before
        return _metrics(steps, batch.denominator) | self._speed(batch, start)

    def score(self, batch: Batch) -> NDArray[np.float32]:
        """Return log-probs of this rank's shard under the current weights, zero outside the mask.

        Ranks: all of the role. Shape: [T].
        """
        scores = np.zeros(batch.num_tokens, np.float32)
        ends = np.cumsum(batch.lengths)
        for sequences in self._sequences_by_micro_batch(batch):
            tokens = [np.arange(ends[i] - batch.lengths[i], ends[i]) for i in sequences]
            flat = np.concatenate(tokens) if tokens else np.zeros(0, np.int64)
            micro = lay_out(batch.select(sequences), self.backend.device)
            scores[flat[batch.mask[flat]]] = self._logprobs(micro).cpu().numpy()
        return scores

    def _minibatches(self, batch: Batch) -> list[Batch]:
        """Return equally many minibatches on every rank, at most as many as the largest shard has
        sequences: each has some to learn from.
        """
        count = self.cfg.minibatches
        if count > 1:
            count = max(1, min(count, self.context.all_reduce_max(len(batch.lengths))))
        return [batch.select(part) for part in split_sequences(batch.lengths.tolist(), count)]

    def _micro_batches(self, batch: Batch) -> list[MicroBatch]:
        parts = self._sequences_by_micro_batch(batch)
        return [lay_out(batch.select(part), self.backend.device) for part in parts]

    def _sequences_by_micro_batch(self, batch: Batch) -> list[list[int]]:
        """Return this rank's sequences by micro-batch: as many as the rank that needs most."""
        lengths = batch.lengths.tolist()
        needed = max(num_micro_batches(lengths, self.cfg.max_tokens), 1)
        return split_sequences(lengths, self.context.all_reduce_max(needed))

    def _logprobs(self, micro: MicroBatch) -> Tensor:
        with torch.no_grad():
            return self.backend.forward(micro)[0]

    def _optimize(
        self,
        micros: list[MicroBatch],
        old_logprobs: list[Tensor | None],
        loss: Loss,
        scale: float,
        lr: float | None,
    ) -> dict[str, float]:
        """Take one optimizer step, and return the sums over the role's ranks."""
        sums = MetricSums()
        for micro, old in zip(micros, old_logprobs, strict=True):
            self._backward(micro, old, loss, scale, sums, is_last=micro is micros[-1])
        lr = learning_rate(self.cfg, self.state.optimizer_steps) if lr is None else lr
        gathered = sums.gather(self.context, square_norm=self.backend.square_norm())
        norm = self._checked_norm(gathered)
        clip = self.cfg.clip_norm
        self.backend.step(lr, clip / norm if 0 < clip < norm else 1.0)
        self.state.optimizer_steps += 1
        totals = {name: float(values.sum()) for name, values in gathered.items()}
        max_dlogp = float(gathered[MAX_DLOGP].max())
        return totals | {MAX_DLOGP: max_dlogp, "train/grad_norm": norm, "train/lr": lr}

    def _backward(
        self,
        micro: MicroBatch,
        old_logprobs: Tensor | None,
        loss: Loss,
        scale: float,
        sums: MetricSums,
        *,
        is_last: bool,
    ) -> None:
        """Add the gradients of one micro-batch, and its metrics to `sums`."""
        logprobs, entropy = self.backend.forward(micro)
        old_logprobs = logprobs.detach() if old_logprobs is None else old_logprobs
        out = LossInput(
            logprobs,
            old_logprobs,
            micro.rollout_logprobs,
            micro.advantages,
            _without_gradient(entropy),
            micro.sequence,
        )
        per_token, measured = checked(loss(out), out, loss)
        weighted = per_token * micro.weight
        self.backend.backward(weighted.sum() * scale, last=is_last)
        for name, values in {"loss": weighted, "train/entropy": entropy, **measured}.items():
            sums.add(name, values)
        compare_with_rollout(old_logprobs, micro, self.state.version, sums)

    def _checked_norm(self, gathered: dict[str, NDArray[np.float64]]) -> float:
        """Return the global gradient norm.

        Raises: SpmdError where it or a loss is not finite; the gradients are then discarded.
        """
        for what, values in (("loss", gathered["loss"]), ("gradient", gathered["square_norm"])):
            indices = np.flatnonzero(~np.isfinite(values))
            if len(indices):
                self.backend.discard()
                ranks = ", ".join(str(self.context.placement.ranks[i]) for i in indices)
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
        total_s, num_tokens, flops = self.context.all_reduce_sum(own)
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
        "the loss uses out.entropy, which carries no gradient yet, so nothing would be learned "
        "from it: return it as a measurement only, or use out.entropy.detach() as a constant"
    )


def _metrics(steps: list[dict[str, float]], denominator: float) -> dict[str, float]:
    """Return the metrics of a train step from the sums of its optimizer steps."""
    names = [name for name in steps[0] if name not in (MAX_DLOGP, "square_norm")]
    totals = {name: sum(step[name] for step in steps) for name in names}
    num_tokens = max(totals.pop("tokens"), 1.0)
    metrics = {
        "train/loss": totals.pop("loss") / denominator,
        "train/grad_norm": totals.pop("train/grad_norm") / len(steps),
        "train/lr": totals.pop("train/lr") / len(steps),
        **on_policy_metrics(totals, max(step[MAX_DLOGP] for step in steps)),
    }
    return metrics | {name: value / num_tokens for name, value in totals.items()}
