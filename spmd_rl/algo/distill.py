"""On-policy distillation: a student learns from a teacher's log-probs of the student's samples.

A = teacher, S = student. The sampled-token form gives each token the advantage
coef * (log A - log S), which any policy loss takes. The top-k form compares the distributions on
the teacher's k likeliest tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from spmd_rl.algo.losses import LossInput, column_of
from spmd_rl.errors import ConfigError, ContractError
from spmd_rl.types.batch import Batch
from spmd_rl.types.columns import offsets_of
from spmd_rl.types.token_values import TokenValues

if TYPE_CHECKING:
    from torch import Tensor

Direction = Literal["forward", "reverse"]

TEACHER = "teacher_logprobs"
CANDIDATES, CANDIDATE_TEACHER = "candidates", "candidate_teacher_logprobs"
LEAST_TAIL = 1e-6  # probability of all other tokens; below it, fp32 sums are rounding


def distill_credit(batch: Batch, *, coef: float = 1.0) -> Batch:
    """Return the batch with coef * (teacher - student) added to each token's advantage.

    Its mean is -coef times an unbiased estimate of KL(student || teacher). The student's log-probs
    are those with which its engine drew the tokens, and the teacher's are in the column
    "teacher_logprobs".
    Raises: ContractError without that column.
    Source: Agarwal et al. 2023 (GKD); Lu et al. 2025 (on-policy distillation).
    """
    gain = np.float32(coef) * (_teacher(batch) - batch.rollout_logprobs)
    advantages = np.where(batch.mask, batch.advantages + gain, np.float32(0))
    return replace(batch, advantages=advantages.astype(np.float32))


def distill_metrics(batch: Batch) -> dict[str, float]:
    """Return the estimate of KL(student || teacher) per token, and how likely the teacher finds
    the student's tokens.
    """
    teacher = _teacher(batch)[batch.mask].astype(np.float64)
    student = batch.rollout_logprobs[batch.mask].astype(np.float64)
    if not len(teacher):
        return {}
    return {
        "distill/kl": float((student - teacher).mean()),
        "distill/teacher_logprob": float(teacher.mean()),
    }


def distill_gains(batch: Batch) -> NDArray[np.float64]:
    """Return the mean of teacher - student over the tokens of each sequence. Shape: [N]."""
    gains = np.where(batch.mask, _teacher(batch) - batch.rollout_logprobs, 0.0)
    sums = np.add.reduceat(gains, offsets_of(batch.lengths)[:-1])
    return np.asarray(sums / np.maximum(batch.num_learned, 1), np.float64)


def with_candidates(batch: Batch, ids: TokenValues, logprobs: TokenValues) -> Batch:
    """Return the batch with a teacher's likeliest tokens and their log-probs."""
    return batch.with_columns(**{CANDIDATES: ids, CANDIDATE_TEACHER: logprobs})


def topk_kl_loss(
    out: LossInput, *, direction: Direction = "reverse", coef: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the KL divergence at each token, over the teacher's candidates and the rest as one.

        forward  sum of A log(A / S): the student covers all that the teacher may say
        reverse  sum of S log(S / A): the student keeps to what the teacher finds likely

    All other tokens count as one outcome, so that the divergence is 0 only where both agree on
    every candidate. It bounds the divergence over the whole vocabulary from below, and is equal to
    it where the candidates are the vocabulary. The train step needs
    rl.Needs(candidates=True).
    Raises: ContractError without candidates.
    Source: Agarwal et al. 2023 (GKD).
    """
    if out.candidate_logprobs is None or CANDIDATE_TEACHER not in out.columns:
        raise ContractError(
            "topk_kl_loss needs log-probs of candidates: make the batch with with_candidates, "
            "and call train_step with needs=rl.Needs(candidates=True)"
        )
    student = _with_tail(out.candidate_logprobs)
    teacher = _with_tail(out.columns[CANDIDATE_TEACHER].to(student.dtype))
    if direction == "forward":
        divergence = (teacher.exp() * (teacher - student)).sum(-1)
    elif direction == "reverse":
        divergence = (student.exp() * (student - teacher)).sum(-1)
    else:
        raise ConfigError(f"direction must be forward or reverse, not {direction!r}")
    return coef * divergence, {"distill/topk_kl": divergence.detach()}


def _with_tail(logprobs: Tensor) -> Tensor:
    """Append the log of the probability of all other tokens. Shape: [M, K] to [M, K + 1]."""
    import torch

    tail = 1 - logprobs.exp().sum(-1, keepdim=True)
    return torch.cat([logprobs, tail.clamp(min=LEAST_TAIL).log()], dim=-1)


def _teacher(batch: Batch) -> NDArray[np.float32]:
    remedy = "add it by batch.with_columns(teacher_logprobs=teacher.score.call(batch))"
    return column_of(batch.columns, TEACHER, remedy)
