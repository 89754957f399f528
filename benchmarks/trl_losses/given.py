"""Our losses on given numbers in float64, beside TRL's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.peer import Peer
from benchmarks.record import measured
from benchmarks.table import Row
from benchmarks.trl_losses.cases import CASES, MAX_TOKENS, Case
from spmd_rl.algo.advantages import group_advantage, rloo_advantage
from spmd_rl.algo.algorithm import Algorithm
from spmd_rl.algo.config import PolicyConfig
from spmd_rl.algo.distill import CANDIDATE_TEACHER, topk_kl_loss
from spmd_rl.algo.dpo import bradley_terry_loss, dpo_loss
from spmd_rl.algo.gdpo import gdpo_advantage
from spmd_rl.algo.losses import LossInput, ValueInput
from spmd_rl.algo.make import make_algorithm
from spmd_rl.algo.overlong import overlong_penalty
from spmd_rl.algo.pair_packing import pack_pairs
from tests.unit.algo.cases import (
    Answer,
    batch_of,
    draw_case,
    groups_of,
    kept_answers,
    loss_and_gradient,
)

PPM = 1e-6
SAME = 1.0  # parts per million of the largest gradient, in float64
SAME_F32 = 20.0  # where TRL computes in float32
NUM_DRAWS = 6
EOS, OTHER = 1, 5  # token ids
Flat = NDArray[np.float64]


def ppm_row(what: str, off: float, at_most: float) -> Row:
    """Return the row of a relative difference, in parts per million."""
    return measured(what, off / PPM, "ppm", at_most=at_most)


def relative(found: tuple[float, Flat], expected: tuple[float, Flat]) -> float:
    """Return the largest difference of loss and gradient, over the largest of the gradient."""
    size = float(np.abs(expected[1]).max())
    if size == 0:
        raise SystemExit("TRL's gradient is zero: nothing is compared")
    off = float(np.abs(found[1] - expected[1]).max())
    return max(off, abs(found[0] - expected[0])) / size


def policy_rows(trl: Peer) -> Iterator[Row]:
    """Yield a row for each case: its largest difference over the draws."""
    for name, case in CASES.items():
        largest = max(policy_distance(case, answers, trl) for answers in draws(case))
        what = f"{name}: {'loss and gradient' if case.loss_too else 'gradient'}"
        yield ppm_row(what, largest, SAME) if case.bar else measured(what, largest, "relative")


def draws(case: Case) -> Iterator[list[Answer]]:
    """Yield drawn answers that the micro-batches can share; one group has equal rewards."""
    found = 0
    for seed in range(100):
        masked = case.observations and seed % 2 == 1
        answers = draw_case(seed, observations=masked, equal_group=True)
        if len(answers) % case.micros == 0 and found < NUM_DRAWS:
            found += 1
            yield [replace(a, logprobs=a.old) for a in answers] if case.on_policy else answers


def algorithm_of(case: Case) -> Algorithm:
    cfg = PolicyConfig(algorithm=case.algorithm, **case.settings)  # type: ignore[arg-type]
    return make_algorithm(cfg, num_samples=4, max_response_tokens=MAX_TOKENS)


def policy_distance(case: Case, answers: list[Answer], trl: Peer) -> float:
    """Return how far our loss and gradient are from TRL's, with our advantages on both sides."""
    made = algorithm_of(case)
    kept = kept_answers(answers, made)
    batch = batch_of(answers, made)
    logprobs = np.concatenate([answer.logprobs for answer in kept])
    loss, gradient = loss_and_gradient(made, batch, logprobs, num_micros=case.micros)
    owner = np.repeat(np.arange(batch.num_sequences), batch.lengths)[batch.mask]
    first = np.unique(owner, return_index=True)[1]
    advantages = batch.advantages[batch.mask][first].astype(float)
    prompts = {answer.prompt for answer in kept}
    is_kept = np.array([answer.prompt in prompts for answer in answers])
    given, whole = np.zeros(len(answers)), np.zeros(sum(a.num_tokens for a in answers))
    given[is_kept] = advantages  # a group that we leave out has advantages of 0
    whole[np.repeat(is_kept, [a.num_tokens for a in answers])] = gradient
    reply = trl.ask(**policy_request(case, answers), advantages=given.tolist())
    factor = case.factor(answers)
    theirs = reply["loss"], np.concatenate(reply["gradient"])
    value = loss * factor if case.loss_too else reply["loss"]
    return relative((value, whole * factor), theirs)


def policy_request(case: Case, answers: list[Answer], **changes: Any) -> dict[str, Any]:
    """Return what TRL's trainers read of the answers."""
    names = ("logprobs", "old", "reference", "entropy")
    request: dict[str, Any] = {
        "kind": "policy",
        "trainer": case.trainer,
        "config": {"max_completion_length": MAX_TOKENS} | case.trl,
        "micros": case.micros,
        "vllm": case.vllm,
        "num_generations": None,
        "prompts": [[OTHER] * (1 + answer.prompt) for answer in answers],
        "completions": [_tokens(answer) for answer in answers],
        "tool_mask": [[int(learned) for learned in answer.learned] for answer in answers],
        "sampling": [answer.rollout for answer in answers],
        "rewards": [[answer.reward] for answer in answers],
        **{name: [getattr(answer, name) for answer in answers] for name in names},
    }
    return request | changes


def _tokens(answer: Answer) -> list[int]:
    """Return token ids, the last of which says whether the answer ended."""
    return [OTHER] * (answer.num_tokens - 1) + [EOS if answer.status == "completed" else OTHER]


GROUP = 5  # answers of a prompt, for TRL; those that are missing have no reward
# so that the constants which are added to deviations, 1e-6 here and 1e-4 in TRL, do not count
LARGE = 2.0**20
PARTS = {"right": 1.0, "ended": 0.5}
ADVANTAGES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "grpo": (group_advantage, "grpo", {}),
    "dr_grpo": (partial(group_advantage, use_std=False), "grpo", {"scale_rewards": "none"}),
    "rloo": (rloo_advantage, "rloo", {"beta": 0.0}),
    "gdpo": (
        partial(gdpo_advantage, weights={name: LARGE * one for name, one in PARTS.items()}),
        "grpo",
        {
            "multi_objective_aggregation": "normalize_then_sum",
            "reward_weights": [LARGE * one for one in PARTS.values()],
        },
    ),
}


def advantage_rows(trl: Peer) -> Iterator[Row]:
    """Yield how far our advantages of ragged groups are from TRL's."""
    for name in ADVANTAGES:
        off = max(advantage_distance(name, draw_case(seed), trl, LARGE) for seed in range(4))
        yield ppm_row(f"{name}: advantages of large rewards", off, SAME)
    off = max(advantage_distance("grpo", draw_case(seed), trl, 1.0) for seed in range(4))
    yield measured("grpo: advantages of rewards from 0 to 1.25", off, "relative")


def advantage_distance(name: str, drawn: list[Answer], trl: Peer, scale: float) -> float:
    """Return the largest difference over the largest advantage, rewards being multiplied."""
    estimator, trainer, config = ADVANTAGES[name]
    answers = [
        replace(
            answer,
            reward=scale * answer.reward,
            parts={part: scale * value for part, value in answer.parts.items()},
        )
        for answer in drawn
    ]
    ours = np.concatenate(estimator(groups_of(answers)))
    parts = [*PARTS] if name == "gdpo" else ["reward"]
    rows = _filled_up(answers)
    rewards = [
        [None] * len(parts) if answer is None else [answer.parts[part] for part in parts]
        for answer in rows
    ]
    if name != "gdpo":
        rewards = [[None if answer is None else answer.reward] for answer in rows]
    case = Case("grpo", {}, config, trainer=trainer, micros=1)
    filled = [answer or answers[0] for answer in rows]
    request = policy_request(case, filled, rewards=rewards, num_generations=GROUP)
    theirs = trl.ask(**request, advantages=None)["advantages"]
    real = [value for value, answer in zip(theirs, rows, strict=True) if answer is not None]
    return float(np.abs(ours - real).max() / np.abs(ours).max())


def _filled_up(answers: list[Answer]) -> list[Answer | None]:
    """Return GROUP rows for each prompt, those without an answer being None."""
    rows: list[Answer | None] = []
    for prompt in sorted({answer.prompt for answer in answers}):
        mine = [answer for answer in answers if answer.prompt == prompt]
        rows += [*mine, *[None] * (GROUP - len(mine))]
    return rows


# settings of `dpo_loss`, TRL's settings, micro-batches
DPO: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "sigmoid": ({"beta": 0.3}, {"beta": 0.3}, 3),
    "ipo": ({"beta": 0.3, "loss_type": "ipo"}, {"beta": 0.3, "loss_type": "ipo"}, 3),
    "hinge": ({"beta": 0.7, "loss_type": "hinge"}, {"beta": 0.7, "loss_type": "hinge"}, 3),
    # aot sorts pairs; of one pair it is the loss with label smoothing, which sigmoid is not in TRL
    "label smoothing, loss_type aot of single pairs": (
        {"beta": 0.5, "label_smoothing": 0.2},
        {"beta": 0.5, "label_smoothing": 0.2, "loss_type": "aot"},
        6,
    ),
}
# (prompt, chosen, rejected) lengths: ragged
SHAPES = [(2, 3, 1), (1, 1, 4), (4, 2, 6), (3, 5, 5), (1, 7, 2), (2, 1, 1)]


def dpo_rows(trl: Peer) -> Iterator[Row]:
    for name, (settings, config, micros) in DPO.items():
        off = max(dpo_distance(settings, config, micros, seed, trl) for seed in range(4))
        yield ppm_row(f"DPO {name}: loss and gradient", off, SAME)


def dpo_distance(
    settings: dict[str, Any], config: dict[str, Any], micros: int, seed: int, trl: Peer
) -> float:
    rng = np.random.default_rng(seed)
    sizes = [size for shape in SHAPES for size in shape[1:]]
    reference = np.float32(rng.normal(-2, 0.5, sum(sizes)))
    logprobs = reference + rng.normal(0, 0.6, sum(sizes))
    batch = pack_pairs([(_sequence(p, c), _sequence(p, r)) for p, c, r in SHAPES])
    spread = np.zeros(batch.num_tokens)
    columns = {"old_logprobs": spread, "entropy": spread}
    columns |= {"token": np.cumsum(batch.mask) - 1, "reference_logprobs": spread.copy()}
    columns["reference_logprobs"][batch.mask] = reference
    types = {"token": np.int32}
    batch = batch.with_columns(
        **{name: column.astype(types.get(name, np.float32)) for name, column in columns.items()}
    )
    made: Any = SimpleNamespace(loss=partial(dpo_loss, **settings))
    found = loss_and_gradient(made, batch, logprobs, num_micros=micros)
    answers = np.split(logprobs, np.cumsum(sizes)[:-1])
    sums = [row.sum() for row in np.split(reference.astype(float), np.cumsum(sizes)[:-1])]
    pairs = [
        {
            "tokens": _pair_tokens(shape, sums[2 * number], sums[2 * number + 1]),
            "chosen": answers[2 * number].tolist(),
            "rejected": answers[2 * number + 1].tolist(),
        }
        for number, shape in enumerate(SHAPES)
    ]
    reply = trl.ask(kind="dpo", pairs=pairs, config=config, micros=micros)
    return relative(found, (reply["loss"], np.concatenate(reply["gradient"])))


def _sequence(prompt: int, answer: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    return np.full(prompt + answer, OTHER, np.int32), np.arange(prompt + answer) >= prompt


def _pair_tokens(shape: tuple[int, int, int], chosen: float, rejected: float) -> dict[str, Any]:
    ids = [[OTHER] * size for size in shape]
    return {
        "prompt_ids": ids[0],
        "chosen_ids": ids[1],
        "rejected_ids": ids[2],
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }


def reward_rows(trl: Peer) -> Iterator[Row]:
    for margin, center in ((0.0, 0.0), (0.25, 0.01)):
        off = max(reward_distance(margin, center, seed, trl) for seed in range(4))
        what = "reward model" + (", margin and centering" if margin else "")
        yield ppm_row(f"{what}: loss and gradient", off, SAME)


def reward_distance(margin: float, center: float, seed: int, trl: Peer) -> float:
    rewards = np.random.default_rng(seed).normal(0, 1.5, (6, 2))
    leaf = torch.tensor(rewards.flatten(), requires_grad=True)
    total = torch.zeros((), dtype=torch.float64)
    for part in leaf.split(4):  # three micro-batches of two pairs
        out = ValueInput(part, torch.arange(4), 4)
        total = total + bradley_terry_loss(out, margin=margin, center_coef=center)[0].sum() / 6
    total.backward()
    config = {"center_rewards_coefficient": center} if center else {}
    reply = trl.ask(kind="reward", rewards=rewards.tolist(), margin=margin, config=config, micros=3)
    assert leaf.grad is not None
    return relative((total.item(), leaf.grad.numpy()), (reply["loss"], np.array(reply["gradient"])))


def distill_rows(trl: Peer) -> Iterator[Row]:
    """Yield the divergence over the whole vocabulary, which TRL computes in float32."""
    for direction, beta in (("forward", 0.0), ("reverse", 1.0)):
        off = max(distill_distance(direction, beta, seed, trl) for seed in range(4))
        what = f"distillation, {direction} KL over the vocabulary: loss and gradient"
        yield ppm_row(what, off, SAME_F32)


def distill_distance(direction: str, beta: float, seed: int, trl: Peer) -> float:
    rng = np.random.default_rng(seed)
    student, teacher = (np.float32(rng.normal(0, 1, (7, 11))).astype(float) for _ in range(2))
    leaf = torch.tensor(student, requires_grad=True)
    zeros, judged = torch.zeros(7), torch.tensor(teacher).log_softmax(-1)
    out = LossInput(
        *[zeros] * 5,
        sequence=torch.zeros(7, dtype=torch.int64),
        columns={CANDIDATE_TEACHER: judged[:, :-1]},  # the last token is the rest
        candidate_logprobs=leaf.log_softmax(-1)[:, :-1],
    )
    loss = topk_kl_loss(out, direction=direction)[0].mean()  # type: ignore[arg-type]
    loss.backward()
    given = {"student": student.tolist(), "teacher": teacher.tolist()}
    reply = trl.ask(kind="divergence", beta=beta, **given)
    assert leaf.grad is not None
    found = loss.item(), leaf.grad.numpy().flatten()
    return relative(found, (reply["loss"], np.array(reply["gradient"])))


def overlong_rows(trl: Peer) -> Iterator[Row]:
    lengths, limit, buffer = [*range(1, 21)], 20, 8
    reply = trl.ask(kind="overlong", lengths=lengths, max_tokens=limit, buffer=buffer)
    ours = [
        overlong_penalty(n, max_response_tokens=limit, buffer=buffer, penalty=1.0) for n in lengths
    ]
    off = float(np.abs(np.array(ours) - reply["penalties"]).max())
    yield ppm_row("dapo: penalty on long answers", off, SAME)
