from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from spmd_rl.algo.losses import grpo_loss
from spmd_rl.controller.run.checksums import checksum
from spmd_rl.errors import ConfigError, SpmdError
from spmd_rl.observe import atomic_write
from spmd_rl.train.checkpoint import checkpoint, shards
from spmd_rl.train.checkpoint.checkpoint_index import INDEX_FILE
from spmd_rl.train.config import OptimizerConfig, TrainerConfig
from spmd_rl.train.trainer import Trainer
from tests.dist.train_case import local_weights, make_batch


def _same_weights(a: Trainer, b: Trainer) -> bool:
    return all(
        torch.equal(one.local, local_weights(b)[name].local)
        for name, one in local_weights(a).items()
    )


@pytest.fixture
def saved(new_trainer, tmp_path: Path) -> Path:
    """A checkpoint after one step."""
    trainer = new_trainer()
    trainer.train_step(make_batch(0), grpo_loss)
    trainer.save(str(tmp_path / "saved"))
    trainer.wait_until_saved()
    return tmp_path / "saved"


def edit(saved: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the index as somebody would who wants it to be read."""
    index = json.loads((saved / INDEX_FILE).read_text())
    change(index)
    (saved / INDEX_FILE).write_text(json.dumps(index))


def test_gradients_of_another_backend_are_a_caveat(new_trainer, tmp_path: Path) -> None:
    """Though the forward pass may have the same bits. Earlier checkpoints are of FSDP2."""
    trainer = new_trainer()
    trainer.save(str(tmp_path / "step_0"))
    trainer.wait_until_saved()
    index = tmp_path / "step_0" / INDEX_FILE
    written = index.read_text()
    index.write_text(written.replace('"gradients":"fsdp2"', '"gradients":"megatron"'))
    trainer.load(str(tmp_path / "step_0"))
    assert trainer.resume_differences() == [
        "the trainer and the checkpoint follow different numeric contracts: "
        "gradients is 'fsdp2' in the first and 'megatron' in the second"
    ]
    index.write_text(written.replace(',"gradients":"fsdp2"', ""))
    trainer.load(str(tmp_path / "step_0"))
    assert trainer.resume_differences() == []


def test_another_numeric_contract_is_a_caveat(new_trainer, tmp_path: Path) -> None:
    trainer = new_trainer()
    trainer.save(str(tmp_path / "step_0"))
    trainer.wait_until_saved()
    trainer.load(str(tmp_path / "step_0"))
    assert trainer.resume_differences() == []
    facts = tmp_path / "step_0" / INDEX_FILE
    facts.write_text(facts.read_text().replace(torch.__version__, "0.1"))
    trainer.load(str(tmp_path / "step_0"))
    assert trainer.resume_differences() == [
        "the trainer and the checkpoint follow different numeric contracts: "
        f"torch is '{torch.__version__}' in the first and '0.1' in the second"
    ]


@pytest.mark.parametrize("old", ["trainer.json", ".metadata"])
def test_a_checkpoint_of_an_older_version_is_refused(new_trainer, tmp_path: Path, old: str) -> None:
    (tmp_path / old).write_bytes(b"\x80\x04.")
    with pytest.raises(
        ConfigError, match="is a checkpoint of an older version of spmd_rl, which is no longer read"
    ):
        new_trainer().load(str(tmp_path))


def test_a_checkpoint_of_a_later_version_is_refused(saved: Path, new_trainer) -> None:
    edit(saved, lambda index: index.update(format=2))
    with pytest.raises(
        ConfigError, match="has format 2, and this version of spmd_rl reads format 1"
    ):
        new_trainer().load(str(saved))


def test_a_checkpoint_of_weights_alone_says_what_it_lacks(new_trainer, tmp_path: Path) -> None:
    whole, trainer = new_trainer(), new_trainer(save_optimizer=False)
    for one in (whole, trainer):
        one.train_step(make_batch(0), grpo_loss)
        one.save(str(tmp_path / str(one.cfg.save_optimizer)))
        one.wait_until_saved()
    sizes = [
        sum(file.stat().st_size for file in (tmp_path / name).iterdir())
        for name in ("False", "True")
    ]
    assert sizes[0] < 0.45 * sizes[1]
    resumed = new_trainer(seed=7)
    # leaves moments that do not belong to what is loaded
    resumed.train_step(make_batch(3), grpo_loss)
    assert resumed.load(str(tmp_path / "False")) == 1
    assert _same_weights(resumed, trainer)
    assert resumed.resume_differences() == [
        "the checkpoint holds no optimizer state, and the optimizer begins anew"
    ]
    assert resumed.learner.state.optimizer_steps == 1, "the schedule goes on"
    anew = new_trainer()
    anew.load(str(tmp_path / "True"))
    for kind in ("exp_avg", "exp_avg_sq"):
        for _, held in anew.backend.state()[kind]:
            held.local.zero_()
    anew.backend.on_loaded(0)
    for one in (resumed, anew):
        one.train_step(make_batch(1), grpo_loss)
    assert _same_weights(resumed, anew)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"optimizer": OptimizerConfig("muon")},
            "it holds exp_avg, exp_avg_sq, weights, not exp_avg, exp_avg_sq, momentum_buffer, "
            "weights;",
        ),
        (
            {"freeze": ("lm_head.*",)},
            "it has exp_avg of 'lm_head.weight', and the trainer has not;",
        ),
    ],
)
def test_another_optimizer_is_refused(
    saved: Path, new_trainer, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        new_trainer(**options).load(str(saved))
    assert str(raised.value) == (
        f"{saved} is of another optimizer: {sentence} "
        "set trainer.optimizer.kind and trainer.freeze as in the run that wrote it"
    )


def test_moments_that_are_missing_are_named(new_trainer, tmp_path: Path) -> None:
    trainer = new_trainer(freeze=("lm_head.*",))
    trainer.save(str(tmp_path / "step_0"))
    trainer.wait_until_saved()
    with pytest.raises(
        ConfigError, match="the trainer has exp_avg of 'lm_head.weight', and it has not;"
    ):
        new_trainer().load(str(tmp_path / "step_0"))
    assert new_trainer(freeze=("lm_head.*",), seed=4).load(str(tmp_path / "step_0")) == 0


@pytest.mark.parametrize("file", ["weights-00000-000", "exp_avg-00000-000", "exp_avg_sq-00000-000"])
def test_a_file_that_changed_by_a_bit_is_refused(saved: Path, new_trainer, file: str) -> None:
    path = saved / f"{file}.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        SpmdError, match=rf"{file}.safetensors is not as it was written: its checksum"
    ):
        new_trainer().load(str(saved))
    path.unlink()
    with pytest.raises(SpmdError, match=rf"{file}.safetensors is missing"):
        new_trainer().load(str(saved))


def first(index: dict[str, Any]) -> dict[str, Any]:
    return index["tensors"]["weights"]["model.embed_tokens.weight"]


CRAFTED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "unknown field": (lambda index: index.update(code="print()"), "unknown field `code`"),
    "path": (lambda index: index["files"].update({"../x.safetensors": 1}), "matching regex"),
    "absolute": (
        lambda index: first(index)["shards"][0].update(file="/etc/passwd"),
        "matching regex",
    ),
    "other file": (
        lambda index: first(index)["shards"][0].update(file="x.safetensors"),
        "which is none of its files",
    ),
    "hole": (lambda index: first(index)["shards"].clear(), "not covered by its shards once"),
    "twice": (
        lambda index: first(index)["shards"].append(first(index)["shards"][0]),
        "not covered by its shards once",
    ),
    "dims": (lambda index: first(index)["shards"][0].update(offset=[0]), "another number of dims"),
    "beyond": (lambda index: first(index)["shards"][0].update(offset=[1, 0]), "reaches beyond it"),
    "negative": (
        lambda index: first(index)["shards"][0].update(offset=[-1, 0]),
        "Expected `int` >= 0",
    ),
    "type": (lambda index: first(index).update(dtype="load"), "has the unknown type 'load'"),
    "no weights": (lambda index: index["tensors"].pop("weights"), "it holds no weights"),
    "another type": (lambda index: first(index).update(dtype="bfloat16"), "is of another model"),
    "huge": (lambda index: _huge(first(index)), "is of another model"),
    "other key": (
        lambda index: first(index)["shards"][0].update(key="model.norm.weight@1"),
        "not as it was written",
    ),
    "lacks a tensor": (
        lambda index: index["tensors"]["weights"].pop("model.norm.weight"),
        "it has no weights of",
    ),
    "one more": (
        lambda index: index["tensors"]["weights"].update(more=first(index)),
        "which the model lacks",
    ),
    "lacks a moment": (
        lambda index: index["tensors"].pop("exp_avg"),
        "is of another optimizer: it holds exp_avg_sq, we",
    ),
}


def _huge(tensor: dict[str, Any]) -> None:
    tensor["shape"] = tensor["shards"][0]["extent"] = [1 << 40, 1 << 20]


@pytest.mark.parametrize(("change", "sentence"), CRAFTED.values(), ids=CRAFTED)
def test_a_crafted_index_is_refused(saved: Path, new_trainer, change, sentence: str) -> None:
    trainer = new_trainer()
    edit(saved, change)
    with pytest.raises(SpmdError, match=sentence) as told:
        trainer.load(str(saved))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    "text", ["", "[]", "[" * 100_000, '{"tensors": ' + '{"a": ' * 100_000, "\x00", "1e999"]
)
def test_an_index_that_is_none_is_refused(saved: Path, new_trainer, text: str) -> None:
    (saved / INDEX_FILE).write_text(text)
    with pytest.raises(SpmdError, match=r"index.json is not as it was written"):
        new_trainer().load(str(saved))


def test_a_crafted_file_of_another_shape_is_refused(saved: Path, new_trainer) -> None:
    """Its checksum is right, for whoever crafts a file crafts the index too."""
    shard = saved / "weights-00000-000.safetensors"
    save_file(
        {f"model.embed_tokens.weight@{number}": torch.zeros(1) for number in range(99)}, shard
    )
    edit(saved, lambda index: index["files"].update({shard.name: checksum(shard)}))
    with pytest.raises(SpmdError, match="not as it was written"):
        new_trainer().load(str(saved))


def test_files_are_cut_and_read_across_the_cuts(new_trainer, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(shards, "FILE_BYTES", 5000)
    trainer, resumed = new_trainer(), new_trainer(seed=7)
    trainer.train_step(make_batch(0), grpo_loss)
    trainer.save(str(tmp_path / "cut"))
    trainer.wait_until_saved()
    assert len(list((tmp_path / "cut").glob("weights-*"))) > 3
    resumed.load(str(tmp_path / "cut"))
    assert _same_weights(trainer, resumed)


def test_what_is_saved_is_of_the_moment_of_the_call(
    new_trainer, tmp_path: Path, monkeypatch
) -> None:
    """Training goes on while the thread writes, and touches nothing of what it writes."""
    trainer, same = new_trainer(), new_trainer()
    for one in (trainer, same):
        one.train_step(make_batch(0), grpo_loss)
    go_on = threading.Event()
    write = checkpoint.write_shards

    def held_up(*args: object) -> object:
        assert go_on.wait(120)
        return write(*args)

    monkeypatch.setattr(checkpoint, "write_shards", held_up)
    trainer.save(str(tmp_path / "step_1"))
    trainer.train_step(make_batch(1), grpo_loss)
    assert not (tmp_path / "step_1").exists()
    go_on.set()
    trainer.wait_until_saved()
    resumed = new_trainer(seed=7)
    assert resumed.load(str(tmp_path / "step_1")) == 1
    assert _same_weights(resumed, same)
    assert not _same_weights(resumed, trainer)
    resumed.train_step(make_batch(1), grpo_loss)
    assert _same_weights(resumed, trainer)


def test_a_full_disk_is_named_and_leaves_the_earlier_checkpoint(
    new_trainer, tmp_path: Path, monkeypatch
) -> None:
    trainer = new_trainer()
    folder = tmp_path / "step_0"
    trainer.save(str(folder))
    trainer.wait_until_saved()
    trainer.train_step(make_batch(), grpo_loss)

    def full_disk(*args: object) -> None:
        raise SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    monkeypatch.setattr(shards, "save_file", full_disk)
    trainer.save(str(folder))
    with pytest.raises(
        SpmdError,
        match=r"cannot save .*step_0: rank 0 .*No space left on device.*; .* MiB are free",
    ):
        trainer.wait_until_saved()
    with pytest.raises(SpmdError, match="No space left on device"):
        trainer.train_step(make_batch(), grpo_loss)
    assert new_trainer().load(str(folder)) == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_0"]


def test_folders_that_vanish_while_it_is_written_are_an_error_alone(
    new_trainer, tmp_path: Path, monkeypatch
) -> None:
    """As when a run is ended, whose controller removes what is unfinished: no thread may fail."""
    trainer = new_trainer()
    folder = tmp_path / "checkpoints" / "step_1" / "trainer"
    write = checkpoint.write_shards

    def written_and_lost(*args: object) -> object:
        written = write(*args)
        shutil.rmtree(tmp_path / "checkpoints")
        return written

    monkeypatch.setattr(checkpoint, "write_shards", written_and_lost)
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    trainer.save(str(folder))
    with pytest.raises(SpmdError, match=r"cannot save .*trainer: .*; .* MiB are free there"):
        trainer.wait_until_saved()
    assert not failed


def test_a_checkpoint_that_was_never_renamed_does_not_count(
    new_trainer, tmp_path: Path, monkeypatch
) -> None:
    """As after a crash between the last byte and the rename."""
    trainer = new_trainer()
    folder = tmp_path / "step_0"
    with monkeypatch.context() as patch:
        patch.setattr(atomic_write, "finish_folder", lambda target: None)
        trainer.save(str(folder))
        trainer.wait_until_saved()
    assert (tmp_path / ".step_0.part" / INDEX_FILE).exists()
    with pytest.raises(ConfigError, match="is not a trainer checkpoint"):
        new_trainer().load(str(folder))
    trainer.save(str(folder))
    trainer.wait_until_saved()
    assert new_trainer().load(str(folder)) == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_0"]


def test_a_folder_without_a_whole_checkpoint_is_refused(new_trainer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"step_9 is not a trainer checkpoint"):
        new_trainer().load(str(tmp_path / "step_9"))


def test_a_trainer_needs_a_model(context) -> None:
    with pytest.raises(ConfigError, match=r"^model is empty"):
        Trainer(TrainerConfig(), context, "")
