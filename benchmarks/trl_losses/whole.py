"""Gradients through our model and trainer in float32, beside those of TRL's trainers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.peer import Peer
from benchmarks.table import Row
from benchmarks.trl_losses.cases import CASES
from benchmarks.trl_losses.given import SAME_F32, algorithm_of, policy_request, ppm_row
from spmd_rl.algo.dpo import bradley_terry_loss, dpo_loss
from spmd_rl.algo.pair_packing import pack_pairs
from spmd_rl.mesh.role_context import Meshes, RoleContext
from spmd_rl.mesh.split import RoleSplit, plan_split
from spmd_rl.mesh.world import World
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.trainer import Trainer
from spmd_rl.train.training_role import TrainingRole
from spmd_rl.train.value_trainer import ValueTrainer
from spmd_rl.types.batch import Batch
from spmd_rl.types.sequence_ends import sequence_ends
from tests.unit.algo.cases import Answer, batch_of, draw_case

# cases whose terms differ, so that each part of the forward pass is used
POLICIES = (
    "grpo, loss_type dapo",
    "dr_grpo",
    "gspo, wide",
    "cispo, narrow",
    "KL k3, unbiased",
    "entropy bonus, one micro-batch",
)
SEED = 3  # its answers are masked in between, and three micro-batches share them
FIRST_ID, NUM_IDS = 2, 104  # token ids of the tokenizer that are not special
MAX_TOKENS = 30  # of a micro-batch of ours, so that there are several
SHAPES = [(2, 3, 1), (1, 1, 4), (4, 2, 6), (3, 5, 5), (1, 7, 2), (2, 1, 1)]


@contextmanager
def one_rank() -> Iterator[RoleContext]:
    """A world of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = World(rank=0, size=1, local_rank=0, local_size=1, node=0, run_id="", restart=0)
        meshes = Meshes(world)
        placement = plan_split({"train": RoleSplit()}, 1).train
        meshes.build([placement])
        yield meshes.context(placement)
    finally:
        dist.destroy_process_group()


def model_rows(trl: Peer, folder: Path) -> Iterator[Row]:
    """Yield how far gradients of all weights are from TRL's, over the norm of TRL's."""
    with one_rank() as context:
        for name in POLICIES:
            off = policy_distance(name, context, trl, folder)
            yield ppm_row(f"{name}: gradient of a model", off, SAME_F32)
        off = dpo_distance(context, trl, folder)
        yield ppm_row("DPO sigmoid: gradient of a model", off, SAME_F32)
        off = reward_distance(context, trl, folder)
        yield ppm_row("reward model: gradient of a model", off, SAME_F32)


def new_role(kind: type[TrainingRole], context: RoleContext, model: Path) -> TrainingRole:
    cfg = TrainerConfig(max_tokens=MAX_TOKENS, clip_norm=0.0)
    return kind(cfg, context, str(model))


def gradients(role: TrainingRole, train: Callable[[], Any]) -> dict[str, Tensor]:
    """Return the gradients of all weights at the optimizer step that `train` takes."""
    found: dict[str, Tensor] = {}
    step = role.backend.step

    def watched(lr: float, grad_scale: float) -> None:
        local = role.backend.local
        found.update(
            {name: one.grad.clone() for name, one in local.items() if one.grad is not None}
        )
        step(lr, grad_scale)

    role.backend.step = watched  # type: ignore[method-assign]
    train()
    return found


def distance(found: dict[str, Tensor], folder: Path) -> float:
    """Return the norm of the difference to what TRL left, as a share of the norm of that."""
    expected = load_file(folder / "gradients.safetensors")
    if found.keys() != expected.keys():
        raise SystemExit(f"other weights: {sorted(found.keys() ^ expected.keys())}")
    square = sum(float(((found[n] - expected[n]).double() ** 2).sum()) for n in expected)
    whole = sum(float((one.double() ** 2).sum()) for one in expected.values())
    return (square / whole) ** 0.5


def policy_distance(name: str, context: RoleContext, trl: Peer, folder: Path) -> float:
    case, rng = CASES[name], np.random.default_rng(0)
    drawn = draw_case(SEED, observations=True)
    tokens = [rng.integers(FIRST_ID, NUM_IDS, answer.num_tokens).tolist() for answer in drawn]
    prompts = [rng.integers(FIRST_ID, NUM_IDS, 1 + prompt).tolist() for prompt in range(4)]
    sequences = [prompts[a.prompt] + row for a, row in zip(drawn, tokens, strict=True)]
    trainer, made = new_role(Trainer, context, folder / "model"), algorithm_of(case)
    assert isinstance(trainer, Trainer)
    whole = _with_tokens(batch_of(drawn, made), sequences)
    answers = around(drawn, _rows(trainer.score(whole).values, drawn, sequences))
    batch = _with_tokens(batch_of(answers, made), sequences)
    found = gradients(trainer, lambda: trainer.train_step(batch, made.loss, needs=made.loss_needs))
    advantages = [row[0] for row in _rows(batch.advantages, drawn, sequences)]
    request = policy_request(case, answers, completions=tokens, kind="model_policy")
    request["prompts"] = [prompts[answer.prompt] for answer in answers]
    trl.ask(**request, advantages=advantages)
    return distance(found, folder)


def _with_tokens(batch: Batch, sequences: list[list[int]]) -> Batch:
    return replace(batch, tokens=np.concatenate(sequences).astype(np.int32))


def _rows(
    values: np.ndarray, answers: list[Answer], sequences: list[list[int]]
) -> list[list[float]]:
    """Return the values of each answer's tokens, from a column of the batch."""
    ends = np.cumsum([*map(len, sequences)])
    return [
        values[end - answer.num_tokens : end].astype(float).tolist()
        for end, answer in zip(ends, answers, strict=True)
    ]


def around(answers: list[Answer], logprobs: list[list[float]]) -> list[Answer]:
    """Return the answers with the model's log-probs, and others near them."""
    rng = np.random.default_rng(1)

    def near(row: list[float]) -> list[float]:
        return (
            np.float32(np.array(row) + 0.2 * rng.standard_normal(len(row))).astype(float).tolist()
        )

    return [
        replace(answer, logprobs=row, old=near(row), reference=near(row))
        for answer, row in zip(answers, logprobs, strict=True)
    ]


def draw_pairs() -> tuple[Batch, list[dict[str, Any]]]:
    """Return ragged pairs as our batch and as TRL's rows."""
    rng = np.random.default_rng(2)
    packed, rows = [], []
    for shape in SHAPES:
        ids = [rng.integers(FIRST_ID, NUM_IDS, size).tolist() for size in shape]
        masks = [[False] * shape[0] + [True] * size for size in shape[1:]]
        both = [np.array(ids[0] + answer, np.int32) for answer in ids[1:]]
        packed.append(tuple(zip(both, map(np.array, masks), strict=True)))
        rows.append(dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), ids, strict=True)))
    return pack_pairs(packed), rows  # type: ignore[arg-type]


def dpo_distance(context: RoleContext, trl: Peer, folder: Path) -> float:
    trainer = new_role(Trainer, context, folder / "model")
    assert isinstance(trainer, Trainer)
    batch, rows = draw_pairs()
    rng = np.random.default_rng(3)
    reference = trainer.score(batch).values + 0.3 * rng.standard_normal(batch.num_tokens)
    column = np.where(batch.mask, reference, 0).astype(np.float32)
    batch = batch.with_columns(reference_logprobs=column)
    starts = np.cumsum(batch.lengths) - batch.lengths
    sums = np.add.reduceat(column.astype(float), starts).reshape(-1, 2)
    for row, (chosen, rejected) in zip(rows, sums.tolist(), strict=True):
        row |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    loss = partial(dpo_loss, beta=0.3)
    found = gradients(trainer, lambda: trainer.train_step(batch, loss))
    trl.ask(kind="model_dpo", pairs=rows, config={"beta": 0.3}, micros=3)
    return distance(found, folder)


def reward_distance(context: RoleContext, trl: Peer, folder: Path) -> float:
    where = folder / "reward_model"
    new_role(ValueTrainer, context, folder / "model").export_hf(str(where))
    _draw_head(where)
    trainer = new_role(ValueTrainer, context, where)
    batch, rows = draw_pairs()
    loss = partial(bradley_terry_loss, center_coef=0.01)
    found = gradients(trainer, lambda: trainer.train_step(sequence_ends(batch), loss))
    pairs = [
        {name: row["prompt_ids"] + row[name] for name in ("chosen_ids", "rejected_ids")}
        for row in rows
    ]
    config = {"center_rewards_coefficient": 0.01}
    trl.ask(kind="model_reward", pairs=pairs, config=config, micros=3)
    return distance(found, folder)


def _draw_head(model: Path) -> None:
    """Draw the value head of a model folder, which is zero at first."""
    path = model / "model.safetensors"
    weights = load_file(path)
    torch.manual_seed(0)
    weights["score.weight"] = torch.randn_like(weights["score.weight"])
    save_file(weights, path, metadata={"format": "pt"})
