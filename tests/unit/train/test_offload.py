"""What waits in host memory changes no bit: moments, master weights, and what layers keep."""

from __future__ import annotations

from pathlib import Path
from threading import Event

import pytest
import torch
from torch import Tensor

from spmd_rl.algo.losses import grpo_loss
from spmd_rl.errors import ConfigError
from spmd_rl.train.checkpoint import checkpoint
from spmd_rl.train.checkpoint.checkpoint import CheckpointWriter
from spmd_rl.train.config import Fsdp2Config
from spmd_rl.train.fsdp2 import activation_offload
from spmd_rl.train.fsdp2.activation_offload import ActivationOffload
from spmd_rl.train.trainer import Trainer
from tests.dist.train_case import make_batch

MAX_TOKENS = 150  # several micro-batches
CHANGING = "perf/train_tokens_per_s"


def steps(trainer: Trainer, seeds: range) -> list[dict[str, float]]:
    """Take steps, and return what they measure besides their speed."""
    found = [trainer.train_step(make_batch(seed), grpo_loss) for seed in seeds]
    return [{name: step[name] for name in step if name != CHANGING} for step in found]


def state(trainer: Trainer) -> dict[tuple[str, str], Tensor]:
    return {
        (kind, name): one.local.detach().clone()
        for kind, tensors in trainer.backend.state().items()
        for name, one in tensors
    }


def unequal(one: Trainer, other: Trainer) -> list[tuple[str, str]]:
    ours, theirs = state(one), state(other)
    assert ours.keys() == theirs.keys()
    return [key for key in ours if not torch.equal(ours[key], theirs[key])]


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have tensors of any size offloaded."""
    monkeypatch.setattr(activation_offload, "LEAST_BYTES", 1)


@pytest.mark.parametrize("wrap", ["layer", "model"])
@pytest.mark.parametrize("offload", ["moments", "master"])
@pytest.mark.parametrize(("minibatches", "dtype"), [(1, "bfloat16"), (2, "float32")])
def test_offload_changes_no_bit(
    new_trainer, offload: str, wrap: str, minibatches: int, dtype: str
) -> None:
    options = {"minibatches": minibatches, "wrap": wrap, "dtype": dtype, "max_tokens": MAX_TOKENS}
    plain, offloading = new_trainer(**options), new_trainer(offload=offload, **options)
    assert steps(offloading, range(3)) == steps(plain, range(3))
    assert unequal(offloading, plain) == []


def test_master_weights_sleep_while_gradients_are_computed(new_trainer) -> None:
    trainer = new_trainer(offload="master", max_tokens=MAX_TOKENS)
    memory, seen = trainer.backend._memory, []
    run = trainer.backend._outputs

    def noting(*arguments):
        seen.append(memory.is_awake("master"))
        return run(*arguments)

    trainer.backend._outputs = noting
    steps(trainer, range(1))
    assert seen
    assert not any(seen)
    assert memory.is_awake("master")
    trainer.score(make_batch())
    assert seen[-1]


def test_master_weights_wake_when_a_loss_fails(new_trainer) -> None:
    plain, trainer = (
        new_trainer(offload=offload, max_tokens=MAX_TOKENS) for offload in ("none", "master")
    )

    def fails(out):
        raise ValueError("no loss")

    for one in (plain, trainer):
        with pytest.raises(ValueError, match="no loss"):
            one.train_step(make_batch(), fails)
    assert trainer.backend._memory.is_awake("master")
    assert steps(trainer, range(2)) == steps(plain, range(2))
    assert unequal(trainer, plain) == []


@pytest.mark.parametrize("kinds", [("none", "moments"), ("moments", "none"), ("master", "none")])
def test_a_checkpoint_goes_on_with_any_other_offload(
    new_trainer, tmp_path: Path, kinds: tuple[str, str]
) -> None:
    whole = new_trainer(offload=kinds[0])
    resumed = new_trainer(offload=kinds[1], seed=7)
    steps(whole, range(2))
    whole.save(str(tmp_path / "saved"))
    steps(whole, range(2, 4))  # while it is written
    whole.wait_until_saved()
    assert unequal(whole, resumed) != []
    assert resumed.load(str(tmp_path / "saved")) == 2
    steps(resumed, range(2, 4))
    assert unequal(whole, resumed) == []


@pytest.mark.parametrize("waits", [True, False])
def test_a_step_waits_until_a_checkpoint_has_read_the_moments(
    new_trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """The writer is held up until the next step is at the point where it waits."""
    write, wait, may_read = checkpoint.write_shards, CheckpointWriter.wait_until_read, Event()

    def late(*arguments):
        assert may_read.wait(60)
        return write(*arguments)

    def noting(self: CheckpointWriter) -> None:
        if waits:
            may_read.set()
            wait(self)

    monkeypatch.setattr(checkpoint, "write_shards", late)
    monkeypatch.setattr(CheckpointWriter, "wait_until_read", noting)
    whole, resumed = new_trainer(offload="moments"), new_trainer(seed=7)
    steps(whole, range(2))
    expected = state(whole)
    whole.save(str(tmp_path / "saved"))
    steps(whole, range(2, 3))
    may_read.set()
    whole.wait_until_saved()
    resumed.load(str(tmp_path / "saved"))
    found = state(resumed)
    wrong = {
        kind for kind, name in found if not torch.equal(found[kind, name], expected[kind, name])
    }
    assert wrong == (set() if waits else {"exp_avg", "exp_avg_sq"})


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_offloaded_activations_change_no_bit(new_trainer, recompute: str) -> None:
    options = {"max_tokens": MAX_TOKENS, "recompute": recompute}
    plain, offloading = new_trainer(**options), new_trainer(offload_activations=True, **options)
    assert steps(offloading, range(2)) == steps(plain, range(2))
    assert unequal(offloading, plain) == []
    assert offloading.backend._activations.num_copied_bytes > 0


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_control_what_comes_back_is_what_gradients_are_made_of(
    new_trainer, monkeypatch: pytest.MonkeyPatch, recompute: str
) -> None:
    options = {"max_tokens": MAX_TOKENS, "recompute": recompute}
    plain, offloading = new_trainer(**options), new_trainer(offload_activations=True, **options)
    bring = ActivationOffload._bring

    def disturbed(self: ActivationOffload, number: int) -> None:
        for kept in self._layers[number].kept.values():
            if kept.on_device is None and kept.host.is_floating_point():
                kept.host.view(-1)[0] += 1
        bring(self, number)

    monkeypatch.setattr(ActivationOffload, "_bring", disturbed)
    assert steps(offloading, range(1)) != steps(plain, range(1))


@pytest.mark.usefixtures("any_size")
def test_host_memory_is_reserved_once(new_trainer) -> None:
    trainer = new_trainer(offload_activations=True, recompute="all", max_tokens=MAX_TOKENS)
    steps(trainer, range(1))
    activations = trainer.backend._activations
    before, copied = activations._host.num_bytes, activations.num_copied_bytes
    steps(trainer, range(3))
    assert activations._host.num_bytes == before
    assert activations.num_copied_bytes > copied


@pytest.mark.usefixtures("any_size")
def test_tensors_come_back_one_layer_ahead(new_trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has three layers, and those of the last stay. The other layers' come back."""
    order: list[tuple[str, int]] = []
    bring, unpack = ActivationOffload._bring, ActivationOffload._unpack

    def bringing(self: ActivationOffload, number: int) -> None:
        if any(kept.on_device is None for kept in self._layers[number].kept.values()):
            order.append(("bring", number))
        bring(self, number)

    def unpacking(self: ActivationOffload, packed):
        found = unpack(self, packed)
        if not isinstance(packed, Tensor) and order[-1] != ("use", packed.layer):
            order.append(("use", packed.layer))
        return found

    monkeypatch.setattr(ActivationOffload, "_bring", bringing)
    monkeypatch.setattr(ActivationOffload, "_unpack", unpacking)
    trainer = new_trainer(offload_activations=True, recompute="all")
    steps(trainer, range(1))
    assert order == [("bring", 1), ("bring", 0), ("use", 1), ("use", 0)]
    assert not any(layer.kept or layer.sources for layer in trainer.backend._activations._layers)


@pytest.mark.usefixtures("any_size")
def test_weights_and_what_stays_anyway_are_not_copied(new_trainer, monkeypatch) -> None:
    packed: list[tuple[int, ...]] = []
    pack = ActivationOffload._pack

    def noting(self: ActivationOffload, number: int, tensor: Tensor, lasting: set[int]):
        found = pack(self, number, tensor, lasting)
        if not isinstance(found, Tensor):
            packed.append(tuple(tensor.shape))
        return found

    monkeypatch.setattr(ActivationOffload, "_pack", noting)
    trainer = new_trainer(offload_activations=True, recompute="none", max_tokens=MAX_TOKENS)
    steps(trainer, range(1))
    weights = {tuple(trainer.backend.gather(name).shape) for name in trainer.backend.names()}
    assert packed
    assert not weights.intersection(packed)


def test_cheap_recomputation_is_refused_with_offloaded_activations() -> None:
    with pytest.raises(ConfigError, match="recompute = 'cheap': expected 'all' or 'none' with"):
        Fsdp2Config(recompute="cheap", offload_activations=True)
