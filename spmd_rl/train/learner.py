"""The train step above any backend: micro-batches, losses, the on-policy proof, clipping, one
optimizer step.

    batch shard -> minibatches -> micro-batches -> log-probs -> loss -> gradients -> checks -> step

With one optimizer step per batch the old log-probs are the new ones, detached; with more, a scoring
pass over the whole batch finds them before the first step. Either way the log-probs of the weights
as they were pushed are compared, bit for bit, with what the engine recorded.
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
from spmd_rl.train.microbatch import MicroBatch, lay_out, num_needed, split
from spmd_rl.train.progress import TrainerState
from spmd_rl.types.batch import Batch

COMPARED, MISMATCHED, MAX_DLOGP = (
    "onpolicy/compared_tokens",
    "onpolicy/mismatched_tokens",
    "onpolicy/max_abs_dlogp",
)
TOKENS = "train/tokens"
MEAN_DLOGP, K1, K3 = "onpolicy/mean_abs_dlogp", "onpolicy/k1", "onpolicy/k3"


class Learner:
    """One rank's half of the algorithm; `progress` moves with every train step."""

    def __init__(self, backend: Backend, context: RoleContext, cfg: TrainerConfig) -> None:
        self.backend = backend
        self.context = context
        self.cfg = cfg
        self.progress = TrainerState()

    def train_step(self, batch: Batch, loss: Loss, lr: float | None = None) -> dict[str, float]:
        """Learn from this rank's shard; the metrics are those of the whole batch, equal on every
        rank.

        A minibatch divides by its share of the denominator, so that each optimizer step sees a loss
        of the same scale.
        Ranks: all of the role. Raises: SpmdError on every rank where a loss or gradient is not
        finite, before the optimizer step that would have used it.
        """
        start = time.perf_counter()
        parts = [self._micro_batches(part) for part in self._minibatches(batch)]
        scale = len(parts) / batch.denominator
        with deterministic(self.cfg.deterministic):
            olds = [
                [self._lp(micro) if part else None for micro in micros]
                for part, micros in enumerate(parts)
            ]
            taken = self.progress.optimizer_steps
            try:
                steps = [
                    self._optimize(micros, old, loss, scale, lr)
                    for micros, old in zip(parts, olds, strict=True)
                ]
            finally:  # a later minibatch may fail: the weights are others by then
                self.progress.version += self.progress.optimizer_steps > taken
        return _metrics(steps, batch.denominator) | self._speed(batch, start)

    def _speed(self, batch: Batch, start: float) -> dict[str, float]:
        """Tokens per second; of GPUs, the memory in use and, where its peak is known, the share of
        arithmetic.

        Ranks: all of the role.
        """
        if self.backend.device.type == "cuda":
            torch.cuda.synchronize(self.backend.device)  # with the optimizer's last step
        seconds = time.perf_counter() - start
        flops = self.backend.flops(batch.lengths, int(batch.mask.sum()))
        total_s, num_tokens, flops = self.context.all_reduce_sum(
            np.array([seconds, batch.num_tokens, flops])
        )
        speed = {
            TOKENS: float(num_tokens),
            "perf/train_tokens_per_s": float(num_tokens / (total_s / self.context.size)),
        }
        if self.backend.device.type == "cuda":
            # torch keeps what the step took at its peak
            free, total = torch.cuda.mem_get_info(self.backend.device)
            speed["memory/gpu_peak_gib"] = self.context.all_reduce_max(total - free) / 2**30
        peak = peak_flops(self.backend.device, self.cfg.dtype)
        return speed | ({"perf/mfu": float(flops / (total_s * peak))} if peak else {})

    def score(self, batch: Batch) -> NDArray[np.float32]:
        """Log-probs under the current weights of this rank's shard, zero outside the mask.

        Ranks: all of the role. Shape: [T].
        """
        scores = np.zeros(batch.num_tokens, np.float32)
        ends = np.cumsum(batch.lengths)
        for part in self._parts(batch):
            tokens = [np.arange(ends[i] - batch.lengths[i], ends[i]) for i in part]
            flat = np.concatenate(tokens) if tokens else np.zeros(0, np.int64)
            scores[flat[batch.mask[flat]]] = (
                self._lp(lay_out(batch.select(part), self.backend.device)).cpu().numpy()
            )
        return scores

    def _parts(self, batch: Batch) -> list[list[int]]:
        """This rank's sequences by micro-batch: as many micro-batches as the rank that needs most."""
        lengths = batch.lengths.tolist()
        return split(
            lengths, self.context.all_reduce_max(max(num_needed(lengths, self.cfg.max_tokens), 1))
        )

    def _minibatches(self, batch: Batch) -> list[Batch]:
        """As many on every rank, and no more than the largest shard has sequences: each has some to
        learn from.
        """
        count = self.cfg.minibatches
        if count > 1:
            count = max(1, min(count, self.context.all_reduce_max(len(batch.lengths))))
        return [batch.select(part) for part in split(batch.lengths.tolist(), count)]

    def _micro_batches(self, batch: Batch) -> list[MicroBatch]:
        return [lay_out(batch.select(part), self.backend.device) for part in self._parts(batch)]

    def _lp(self, micro: MicroBatch) -> Tensor:
        with torch.no_grad():
            return self.backend.forward(micro)[0]

    def _optimize(
        self,
        micros: list[MicroBatch],
        olds: list[Tensor | None],
        loss: Loss,
        scale: float,
        lr: float | None,
    ) -> dict[str, float]:
        """One optimizer step; returns the sums over the role's ranks."""
        tally = MetricSums()
        for micro, old in zip(micros, olds, strict=True):
            lp, entropy = self.backend.forward(micro)
            old = lp.detach() if old is None else old
            out = LossInput(
                lp, old, micro.roll, micro.advantages, _only_measured(entropy), micro.sequence
            )
            per_token, measured = checked(loss(out), out, loss)
            weighted = per_token * micro.weight
            self.backend.backward(weighted.sum() * scale, last=micro is micros[-1])
            for name, values in {"loss": weighted, "train/entropy": entropy, **measured}.items():
                tally.add(name, values)
            _compare(old, micro, self.progress.version, tally)
        lr = learning_rate(self.cfg, self.progress.optimizer_steps) if lr is None else lr
        gathered = tally.gather(self.context, square_norm=self.backend.square_norm())
        norm = self._checked_norm(gathered)
        clip = self.cfg.clip_norm
        self.backend.step(lr, clip / norm if 0 < clip < norm else 1.0)
        self.progress.optimizer_steps += 1
        sums = {name: float(values.sum()) for name, values in gathered.items()}
        return sums | {
            MAX_DLOGP: float(gathered[MAX_DLOGP].max()),
            "train/grad_norm": norm,
            "train/lr": lr,
        }

    def _checked_norm(self, gathered: dict[str, NDArray[np.float64]]) -> float:
        """The global gradient norm. Raises: SpmdError where it, or a loss, is not finite; gradients
        are forgotten.
        """
        for what, values in (("loss", gathered["loss"]), ("gradient", gathered["square_norm"])):
            bad = [
                str(self.context.placement.ranks[i]) for i in np.flatnonzero(~np.isfinite(values))
            ]
            if bad:
                self.backend.discard()
                raise SpmdError(
                    f"train step {self.progress.version}: the {what} is not finite on rank {', '.join(bad)}; "
                    "that optimizer step was not taken"
                )
        return sqrt(gathered["square_norm"].sum())


def _only_measured(entropy: Tensor) -> Tensor:
    """The same values, whose gradient raises an error: without one, a loss that uses them would
    learn nothing from it.

    No work is added for a loss that does not use them.
    """
    measured = entropy.detach().requires_grad_()
    measured.register_hook(_refuse_gradient)
    return measured


def _refuse_gradient(gradient: Tensor) -> NoReturn:
    raise ContractError(
        "the loss uses out.entropy, which carries no gradient yet, so nothing would be learned from it: return it as a "
        "measurement only, or use out.entropy.detach() as a constant"
    )


def _compare(lp: Tensor, micro: MicroBatch, version: int, tally: MetricSums) -> None:
    """Compare bits where the current weights made the token, and measure the distance wherever an
    engine did.
    """
    current = micro.versions == version
    made = micro.versions >= 0
    distance = torch.where(made, lp - micro.roll, 0.0)
    # of the ratio trainer / engine: how far from 1
    size, beyond_one = distance.abs(), distance.expm1()
    tally.add_each(
        {
            COMPARED: current,
            MISMATCHED: current & (lp.view(torch.int32) != micro.roll.view(torch.int32)),
            "tokens": torch.ones_like(made),
            "made_tokens": made,
            MEAN_DLOGP: size,
            K1: -distance,
            K3: beyond_one - distance,
            "ratio": beyond_one,
            "square_ratio": (2 * distance).expm1(),
        }
    )
    tally.raise_to(MAX_DLOGP, size)


def _ratios(mean: float, mean_square: float) -> dict[str, float]:
    """From the means of ratio - 1 and of ratio^2 - 1, each of a token's ratio trainer / engine."""
    return {"onpolicy/chi2": mean_square, "onpolicy/ess": (1 + mean) ** 2 / (1 + mean_square)}


def _on_policy(total: dict[str, float], largest: float) -> dict[str, float]:
    """What an engine's tokens say, from their sums, which leave `total`; nothing where no engine
    made a token.
    """
    num_made = total.pop("made_tokens")
    sums = {
        name: total.pop(name)
        for name in (MEAN_DLOGP, K1, K3, "ratio", "square_ratio", MISMATCHED, COMPARED)
    }
    if not num_made:
        return {}
    return {
        **{name: sums[name] / num_made for name in (MEAN_DLOGP, K1, K3)},
        **_ratios(sums["ratio"] / num_made, sums["square_ratio"] / num_made),
        **{name: sums[name] for name in (MISMATCHED, COMPARED)},
        MAX_DLOGP: largest,
    }


def _metrics(steps: list[dict[str, float]], denominator: float) -> dict[str, float]:
    """The step's metrics from the sums of its optimizer steps."""
    total = {
        name: sum(step[name] for step in steps)
        for name in steps[0]
        if name not in (MAX_DLOGP, "square_norm")
    }
    num_tokens = max(total.pop("tokens"), 1.0)
    metrics = {
        "train/loss": total.pop("loss") / denominator,
        "train/grad_norm": total.pop("train/grad_norm") / len(steps),
        "train/lr": total.pop("train/lr") / len(steps),
        **_on_policy(total, max(step[MAX_DLOGP] for step in steps)),
    }
    return metrics | {name: value / num_tokens for name, value in total.items()}
