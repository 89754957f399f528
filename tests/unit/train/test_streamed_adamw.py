"""AdamW with moments on the host has the bits of torch's, whatever its chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spmd_rl.errors import ConfigError
from spmd_rl.train.config import Fsdp2Config, OptimizerConfig, TrainerConfig
from spmd_rl.train.optimizer.adamw import ShardedAdamW
from spmd_rl.train.optimizer.moment_chunks import NUM_SLOTS, UNIT, Chunk
from spmd_rl.train.optimizer.moment_stream import MomentStream
from spmd_rl.train.optimizer.parameter_groups import update_rules
from spmd_rl.train.optimizer.streamed_adamw import StreamedAdamW
from tests.dist.optimizer_case import config, gradients, rate, shards

# A matrix over many chunks, with a tail that fills no vector, and others that share one.
SHAPES = {
    "model.embed_tokens.weight": (41, 77),
    "model.layers.0.self_attn.q_proj.bias": (10,),
    "model.layers.0.mlp.up_proj.weight": (24, 80),
    "model.empty": (0, 8),
    "model.norm.weight": (8,),
}
Optimizer = ShardedAdamW | StreamedAdamW


def reserve(num_bytes: int) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def plain(shapes=SHAPES) -> tuple[ShardedAdamW, dict[str, Tensor]]:
    held = shards(shapes, 0, 1, "cpu")
    cfg = config("adamw")
    optimizer = ShardedAdamW(held, update_rules(shapes, cfg, 1), cfg)
    return optimizer, {name: shard.local for name, shard in held.items()}


def streamed(units: int = 1, shapes=SHAPES) -> tuple[StreamedAdamW, dict[str, Tensor]]:
    held = shards(shapes, 0, 1, "cpu")
    cfg = config("adamw")
    rules = update_rules(shapes, cfg, 1)
    optimizer = StreamedAdamW(held, rules, cfg, reserve, units * UNIT)
    return optimizer, {name: shard.local for name, shard in held.items()}


def take_step(step: int, optimizer: Optimizer, local: dict[str, Tensor], without: str = "") -> None:
    shapes = {name: tuple(one.shape) for name, one in local.items()}
    grads = list(gradients(shapes))[step]
    for name, one in local.items():
        one.grad = grads[name] if one.numel() and name != without else None
    optimizer.step(rate(step))


def everything(optimizer: Optimizer, local: dict[str, Tensor]) -> dict[tuple[str, str], Tensor]:
    state = {
        (kind, name): one.local
        for kind, tensors in optimizer.state().items()
        for name, one in tensors
    }
    return state | {("weights", name): one.detach() for name, one in local.items()}


def unequal(one, other) -> list[tuple[str, str]]:
    ours, theirs = everything(*one), everything(*other)
    assert ours.keys() == theirs.keys()
    return [key for key in ours if not torch.equal(ours[key], theirs[key])]


@pytest.mark.parametrize("units", [1, 2, 5, 1000])
def test_it_is_torchs_bit_for_bit(units: int) -> None:
    ours, torchs = streamed(units), plain()
    for step in range(4):
        take_step(step, *ours)
        take_step(step, *torchs)
        assert unequal(ours, torchs) == []


@given(st.lists(st.integers(1, 900), min_size=1, max_size=5), st.integers(1, 4))
def test_it_is_torchs_for_tensors_of_any_size(sizes: list[int], units: int) -> None:
    shapes = {f"model.{number}": (size,) for number, size in enumerate(sizes)}
    shapes |= {"model.layers.up_proj.bias": (3,)}
    ours, torchs = streamed(units, shapes), plain(shapes)
    for step in range(2):
        take_step(step, *ours)
        take_step(step, *torchs)
    assert unequal(ours, torchs) == []


def test_a_parameter_without_a_gradient_stays_and_counts_no_step() -> None:
    ours, torchs = streamed(), plain()
    for step, without in enumerate(["", "model.norm.weight", ""]):
        take_step(step, *ours, without)
        take_step(step, *torchs, without)
    assert unequal(ours, torchs) == []


@pytest.mark.parametrize("to_host", [True, False])
def test_moments_go_on_from_those_of_the_other_kind(to_host: bool) -> None:
    source, target = (plain(), streamed()) if to_host else (streamed(), plain())
    for step in range(2):
        take_step(step, *source)
    copies = everything(*source)
    for key, one in everything(*target).items():
        one.copy_(copies[key])
    target[0].on_loaded(2)
    for one in (source, target):
        take_step(2, *one)
    assert unequal(source, target) == []


def test_control_a_chunk_that_is_not_written_back_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    run = MomentStream.run

    def without_first(self: MomentStream, chunks: Sequence[Chunk], update) -> None:
        kept = [one[: chunks[0].count].clone() for one in self._host]
        run(self, chunks, update)
        for one, old in zip(self._host, kept, strict=True):
            one[: chunks[0].count] = old

    ours, torchs = streamed(), plain()
    for step in range(2):
        if step == 0:
            monkeypatch.setattr(MomentStream, "run", without_first)
        take_step(step, *ours)
        monkeypatch.undo()
        take_step(step, *torchs)
    assert ("weights", "model.embed_tokens.weight") in unequal(ours, torchs)


def test_slots_are_used_in_turn() -> None:
    host = [torch.arange(10.0), torch.zeros(10)]
    chunks = [Chunk(start, 2, ()) for start in range(0, 10, 2)]
    addresses = []

    def update(chunk: Chunk, slot: Sequence[Tensor]) -> None:
        addresses.append(slot[0].data_ptr())
        assert slot[0].tolist() == [chunk.start, chunk.start + 1]
        slot[1].copy_(slot[0] * 2)

    MomentStream(host, torch.device("cpu")).run(chunks, update)
    assert host[1].tolist() == [2.0 * number for number in range(10)]
    assert len(set(addresses)) == NUM_SLOTS
    assert addresses[NUM_SLOTS:] == addresses[: len(chunks) - NUM_SLOTS]


@pytest.mark.parametrize("kind", ["muon", "adamw8bit"])
def test_other_optimizers_are_refused(kind: str) -> None:
    backend = Fsdp2Config(offload="moments")
    with pytest.raises(ConfigError, match="optimizer.kind = '.*': expected 'adamw' with backend"):
        replace(TrainerConfig(optimizer=OptimizerConfig(kind)), backend=backend)
