"""Cases for the tests of algorithms: ragged groups of answers with log-probs on both sides.

Every number that a batch holds as float32 is one that float32 holds exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from spmd_rl.algo.algorithm import Algorithm
from spmd_rl.algo.losses import LossInput
from spmd_rl.types.batch import Batch
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

Flat = NDArray[np.float64]


@dataclass
class Answer:
    """One sample of a prompt. Lists have an entry for each response token."""

    prompt: int
    reward: float
    parts: dict[str, float]
    status: str
    learned: list[bool]  # False for what a tool said
    logprobs: list[float]
    old: list[float]
    rollout: list[float]
    reference: list[float]
    values: list[float]
    entropy: list[float] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.learned)


def draw_case(seed: int, *, observations: bool = False, equal_group: bool = False) -> list[Answer]:
    """Draw answers to four prompts with 2 to 5 samples of 1 to 7 tokens each."""
    rng = np.random.default_rng(seed)

    def numbers(count: int, center: Flat | float, spread: float) -> list[float]:
        return np.float32(center + spread * rng.standard_normal(count)).astype(float).tolist()

    answers = []
    for prompt in range(4):
        for _ in range(int(rng.integers(2, 6))):
            size = int(rng.integers(1, 8))
            learned = [True] * size
            if observations and size > 3:
                for token in rng.integers(1, size, size // 3).tolist():
                    learned[token] = False
            old = numbers(size, -1.5, 0.6)
            right, ended = float(rng.integers(0, 2)), float(rng.integers(0, 3)) / 2
            answers.append(
                Answer(
                    prompt=prompt,
                    reward=1.0 if equal_group and prompt == 0 else right + ended / 4,
                    parts={"reward": right + ended / 4, "right": right, "ended": ended},
                    status="truncated" if rng.random() < 0.3 else "completed",
                    learned=learned,
                    logprobs=(np.array(old) + 0.3 * rng.standard_normal(size)).tolist(),
                    old=old,
                    rollout=numbers(size, np.array(old), 0.4),
                    reference=numbers(size, np.array(old), 0.3),
                    values=numbers(size, 0.5, 0.3),
                    entropy=numbers(size, 1.0, 0.2),
                )
            )
    return answers


def groups_of(answers: list[Answer]) -> list[Group]:
    """Return the answers as graded groups; prompt n has n + 1 tokens."""
    groups = []
    for prompt in sorted({answer.prompt for answer in answers}):
        mine = [answer for answer in answers if answer.prompt == prompt]
        samples = [_sample(prompt, index, answer) for index, answer in enumerate(mine)]
        groups.append(Group(Prompt(prompt, np.arange(1 + prompt, dtype=np.int32)), samples))
    return groups


def _sample(prompt: int, index: int, answer: Answer) -> Sample:
    """Return an answer as a sample, in which a tool's tokens have no version."""
    learned = np.array(answer.learned)
    return Sample(
        prompt,
        index,
        np.arange(answer.num_tokens, dtype=np.int32),
        np.where(learned, answer.rollout, 0).astype(np.float32),
        np.where(learned, 0, -1).astype(np.int32),
        answer.status,  # type: ignore[arg-type]
        reward=answer.reward,
        parts=answer.parts,
    )


def batch_of(answers: list[Answer], algorithm: Algorithm) -> Batch:
    """Return the batch that the algorithm learns from, with every column and credit assigned.

    The column "token" numbers the response tokens of all answers that are left.
    """
    batch = algorithm.pack(groups_of(answers))
    kept = kept_answers(answers, algorithm)
    batch = batch.with_columns(
        old_logprobs=column(batch, kept, "old"),
        reference_logprobs=column(batch, kept, "reference"),
        values=column(batch, kept, "values"),
        entropy=column(batch, kept, "entropy"),
        token=_spread(batch, kept, np.arange(sum(a.num_tokens for a in kept))).astype(np.int32),
    )
    return algorithm.credit(batch) if algorithm.credit else batch


def kept_answers(answers: list[Answer], algorithm: Algorithm) -> list[Answer]:
    """Return the answers of the groups that the algorithm keeps."""
    groups = groups_of(answers)
    kept = [g.prompt.uid for g in groups if algorithm.keeps is None or algorithm.keeps(g)]
    return [answer for answer in answers if not kept or answer.prompt in kept]


def column(batch: Batch, answers: list[Answer], name: str) -> NDArray[np.float32]:
    flat = np.concatenate([getattr(answer, name) for answer in answers])
    return _spread(batch, answers, flat).astype(np.float32)


def _spread(batch: Batch, answers: list[Answer], flat: Flat) -> Flat:
    """Return values of response tokens as a column of the batch, zero outside the mask."""
    is_response = np.concatenate(
        [
            np.arange(length) >= length - answer.num_tokens
            for answer, length in zip(answers, batch.lengths, strict=True)
        ]
    )
    spread = np.zeros(batch.num_tokens)
    spread[is_response] = flat
    return spread * batch.mask


def loss_and_gradient(
    algorithm: Algorithm, batch: Batch, logprobs: Flat, num_shards: int = 1, num_micros: int = 1
) -> tuple[float, Flat]:
    """Return the loss over all shards and micro-batches, and its gradient by response token."""
    leaf = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    total = torch.zeros((), dtype=torch.float64)
    for shard in batch.shard(num_shards):
        for rows in np.array_split(np.arange(shard.num_sequences), num_micros):
            micro = shard.select(rows)
            if micro.mask.any():
                weight = torch.tensor(micro.weight[micro.mask], dtype=torch.float64)
                per_token, _ = algorithm.loss(loss_input(micro, leaf))
                total = total + (per_token * weight).sum() / batch.denominator
    total.backward()
    assert leaf.grad is not None
    return float(total.detach()), leaf.grad.numpy()


def loss_input(micro: Batch, leaf: torch.Tensor) -> LossInput:
    """Return the float64 input of a loss for the tokens in the mask of a micro-batch."""

    def tensor(values: NDArray[np.generic]) -> torch.Tensor:
        return torch.tensor(values[micro.mask].astype(np.float64))

    sequence = np.repeat(np.arange(micro.num_sequences), micro.lengths)[micro.mask]
    return LossInput(
        logprobs=leaf[torch.tensor(micro.columns["token"][micro.mask].astype(np.int64))],
        old_logprobs=tensor(micro.columns["old_logprobs"]),
        rollout_logprobs=tensor(micro.rollout_logprobs),
        advantages=tensor(micro.advantages),
        entropy=tensor(micro.columns["entropy"]),
        sequence=torch.tensor(sequence),
        num_sequences=micro.num_sequences,
        columns={name: tensor(values) for name, values in micro.columns.items()},
    )
