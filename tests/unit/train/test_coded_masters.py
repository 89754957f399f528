"""Training with weights in few bits: its forward pass, its gradients and what a push brings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from spmd_rl.algo.losses import grpo_loss
from spmd_rl.errors import ConfigError
from spmd_rl.kernels.low_precision import block_codes
from spmd_rl.model.formats import FORMATS
from spmd_rl.model.formats.coded_tensors import hold_codes
from spmd_rl.model.formats.coded_weights import coded_shapes, scale_name
from spmd_rl.model.lora import LoraConfig
from spmd_rl.model.network import CausalLM
from spmd_rl.train.checkpoint.export import export_saved
from spmd_rl.train.config import FrozenConfig, TrainerConfig
from spmd_rl.train.megatron.config import MegatronConfig
from spmd_rl.train.trainer import Trainer
from spmd_rl.types.batch import Batch
from spmd_rl.weights.ends import LocalEnds
from spmd_rl.weights.executors import execute
from spmd_rl.weights.local_tensors import LocalTensors
from spmd_rl.weights.plan.layout import Box
from spmd_rl.weights.plan.layout_rules import compressed
from spmd_rl.weights.plan.moves import Traffic, plan_moves
from spmd_rl.weights.proof import source_digests
from spmd_rl.weights.proof.verification import Verifier
from spmd_rl.weights.tensor_ends import CopyingSink, do_nothing
from tests.dist.recipes.mixtures import write_mixture
from tests.dist.train_case import make_batch

NewTrainer = Callable[..., Trainer]
FAMILIES = ("qwen3_moe", "glm4_moe")


def write_wide(folder: Path, family: str) -> Path:
    """Write a mixture whose experts have several blocks, of which the last are smaller."""
    sizes = {"moe_intermediate_size": 136, "num_hidden_layers": 2}
    return write_mixture(folder, family, sizes)


@pytest.fixture(scope="module", params=["dense", *FAMILIES])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, object]:
    """The settings of a trainer of a dense model, or of a mixture."""
    if request.param == "dense":
        return {}
    folder = tmp_path_factory.mktemp("mixture") / "model"
    return {"model": write_wide(folder, request.param), "init": "folder"}


def coded_names(trainer: Trainer) -> set[str]:
    return set(coded_shapes(trainer.backend.scorer.model.spec, "e4m3"))


def rounded_masters(trainer: Trainer, weights: str = "e4m3") -> dict[str, Tensor]:
    """Return the weights that the forward pass should compute with, from the whole masters."""
    return rounded_of(masters(trainer), trainer, weights)


def scores_of(trainer: Trainer, batch: Batch) -> NDArray[np.float32]:
    """Return the log-prob of every scored token."""
    return trainer.score(batch).values


def masters(trainer: Trainer) -> dict[str, Tensor]:
    return {name: trainer.backend.gather(name).detach().clone() for name in trainer.backend.names()}


def pushed(trainer: Trainer) -> dict[str, Tensor]:
    """Return what a push brings, by name, each in the dtype that its layout names."""
    source, found = trainer.weight_source(), dict[str, Tensor]()
    source.open()
    for piece in source.layout(0).pieces:
        found[piece.name] = torch.empty(piece.shape, dtype=getattr(torch, piece.dtype))
        source.read(piece.name, piece.box, found[piece.name])
    return found


@pytest.mark.parametrize(("dtype", "wrap"), [("float32", "layer"), ("bfloat16", "model")])
@pytest.mark.parametrize("weights", FORMATS)
def test_every_version_computes_with_what_its_codes_stand_for(
    new_trainer: NewTrainer, model: dict[str, object], weights: str, dtype: str, wrap: str
) -> None:
    coded = new_trainer(weights=weights, dtype=dtype, wrap=wrap, **model)
    plain = new_trainer(dtype=dtype, wrap=wrap, **model)
    for seed in range(2):
        plain.backend.fill(rounded_masters(coded, weights).items())
        batch = make_batch(seed)
        scores = scores_of(coded, batch)
        assert np.array_equal(scores, scores_of(plain, batch))
        plain.backend.fill(masters(coded).items())
        assert not np.array_equal(scores, scores_of(plain, batch))
        coded.train_step(batch, grpo_loss)


@pytest.mark.parametrize("weights", FORMATS)
def test_gradients_reach_the_masters_as_if_nothing_were_rounded(
    new_trainer: NewTrainer, weights: str
) -> None:
    coded, plain = new_trainer(weights=weights), new_trainer()
    plain.backend.fill(rounded_masters(coded, weights).items())
    before = masters(coded)
    metrics = [one.train_step(make_batch(0), grpo_loss) for one in (coded, plain)]
    for name in ("train/loss", "train/grad_norm"):
        assert metrics[0][name] == metrics[1][name]
    # Adam's first step depends on the gradient alone, and each master takes it from where it is
    for name, after in masters(plain).items():
        step = after - rounded_of(before, coded, weights)[name]
        assert torch.allclose(masters(coded)[name] - before[name], step, atol=1e-6)


def rounded_of(
    whole: dict[str, Tensor], trainer: Trainer, weights: str = "e4m3"
) -> dict[str, Tensor]:
    coded, own = coded_names(trainer), FORMATS[weights]
    return {
        name: block_codes.quantised(own, one).decoded(torch.float32) if name in coded else one
        for name, one in whole.items()
    }


@pytest.mark.parametrize("weights", FORMATS)
def test_masters_keep_what_their_codes_do_not_show(new_trainer: NewTrainer, weights: str) -> None:
    trainer = new_trainer(weights=weights, lr=1e-6)
    before, codes = masters(trainer), pushed(trainer)
    trainer.train_step(make_batch(0), grpo_loss)
    name = sorted(coded_names(trainer))[0]
    assert not torch.equal(masters(trainer)[name], before[name])
    assert torch.equal(pushed(trainer)[name].view(torch.uint8), codes[name].view(torch.uint8))


@pytest.mark.parametrize("weights", FORMATS)
def test_a_push_brings_codes_and_scales_of_the_weights_as_they_are(
    new_trainer: NewTrainer, model: dict[str, object], weights: str
) -> None:
    """A router is among those that are no codes."""
    trainer = new_trainer(weights=weights, **model)
    trainer.train_step(make_batch(0), grpo_loss)
    found, whole = pushed(trainer), masters(trainer)
    coded = coded_names(trainer)
    assert ("model.layers.1.mlp.gate.weight" in whole.keys() - coded) == bool(model)
    assert found.keys() == whole.keys() | set(map(scale_name, coded))
    for name, weight in whole.items():
        if name in coded:
            expected = block_codes.quantised(FORMATS[weights], weight)
            assert found[name].dtype == expected.codes.dtype
            assert torch.equal(found[name].view(torch.uint8), expected.codes.view(torch.uint8))
            assert torch.equal(found[scale_name(name)], expected.scales)
        else:
            assert torch.equal(found[name], weight)


@pytest.mark.parametrize("weights", FORMATS)
def test_any_part_of_a_push_has_the_bits_of_the_whole(
    new_trainer: NewTrainer, weights: str
) -> None:
    trainer = new_trainer(weights=weights)
    source, whole = trainer.weight_source(), pushed(trainer)
    name = sorted(coded_names(trainer))[-1]
    piece = next(one for one in source.layout(0).pieces if one.name == name)
    box = Box((3, 5), (piece.shape[0] - 4, piece.shape[1] - 7))
    part = torch.empty(box.extent, dtype=block_codes.torch_dtype(FORMATS[weights].code_dtype))
    source.read(name, box, part)
    expected = whole[name][box.within(piece.box)]
    assert torch.equal(part.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("weights", FORMATS)
def test_a_resumed_trainer_has_the_same_codes(
    new_trainer: NewTrainer, tmp_path: Path, weights: str
) -> None:
    first = new_trainer(weights=weights)
    first.train_step(make_batch(0), grpo_loss)
    first.save(str(tmp_path / "saved"))
    first.wait_until_saved()
    second = new_trainer(weights=weights)
    second.load(str(tmp_path / "saved"))
    batch = make_batch(1)
    assert np.array_equal(scores_of(first, batch), scores_of(second, batch))
    metrics = [one.train_step(make_batch(1), grpo_loss) for one in (first, second)]
    assert metrics[0]["train/loss"] == metrics[1]["train/loss"]
    assert all(
        torch.equal(one.view(torch.uint8), pushed(second)[name].view(torch.uint8))
        for name, one in pushed(first).items()
    )


def test_an_export_in_8_bits_has_the_codes_of_a_push(
    new_trainer: NewTrainer, tmp_path: Path
) -> None:
    trainer = new_trainer(weights="e4m3")
    trainer.train_step(make_batch(0), grpo_loss)
    trainer.save(str(tmp_path / "saved"))
    trainer.wait_until_saved()
    export_saved(tmp_path / "saved", trainer.model, tmp_path / "hf", torch.float8_e4m3fn)
    stored, codes = load_file(tmp_path / "hf" / "model.safetensors"), pushed(trainer)
    assert stored.keys() == codes.keys()
    for name in coded_names(trainer):
        assert torch.equal(stored[name].view(torch.uint8), codes[name].view(torch.uint8))
        assert torch.equal(stored[scale_name(name)], codes[scale_name(name)])


def test_adapters_are_not_exported_in_8_bits(new_trainer: NewTrainer, tmp_path: Path) -> None:
    trainer = new_trainer(weights="e4m3", lora=LoraConfig(rank=2))
    trainer.save(str(tmp_path / "saved"))
    trainer.wait_until_saved()
    with pytest.raises(ConfigError, match="adapters, which are not written in 8 bits"):
        export_saved(tmp_path / "saved", trainer.model, tmp_path / "hf", torch.float8_e4m3fn)


def test_the_contract_names_the_format(new_trainer: NewTrainer) -> None:
    assert "power" in str(new_trainer(weights="e4m3").numeric_contract()["weights"])
    assert "5 significant bits" in str(new_trainer(weights="int4").numeric_contract()["weights"])
    assert "weights" not in new_trainer().numeric_contract()


def test_a_reference_like_the_trainer_has_its_weights() -> None:
    assert FrozenConfig.like(TrainerConfig(weights="e4m3")).weights == "e4m3"


def test_the_base_beside_adapters_is_what_its_codes_stand_for(new_trainer: NewTrainer) -> None:
    whole = masters(new_trainer())
    trainer = new_trainer(weights="e4m3", lora=LoraConfig(rank=2))
    base = trainer.backend.local
    for name, expected in rounded_of(whole, trainer).items():
        assert torch.equal(base[name], expected), name
    coded = coded_names(trainer)
    assert not any(torch.equal(base[name], whole[name]) for name in coded)
    before = scores_of(trainer, make_batch(0))
    trainer.train_step(make_batch(0), grpo_loss)
    assert not np.array_equal(scores_of(trainer, make_batch(0)), before)
    assert all(torch.equal(base[name], rounded_of(whole, trainer)[name]) for name in coded)
    assert not coded & pushed(trainer).keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": MegatronConfig()}, "Megatron"),
        ({"lora": LoraConfig(rank=2, merged_push=True)}, "merged"),
    ],
)
@pytest.mark.parametrize("weights", FORMATS)
def test_what_does_not_know_codes_is_refused(
    options: dict[str, object], message: str, weights: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainerConfig(weights=weights, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("made_bytes", [1, 20_000, source_digests.MADE_BYTES])
@pytest.mark.parametrize("weights", FORMATS)
def test_one_code_that_differs_after_a_push_is_found_and_named(
    new_trainer: NewTrainer, weights: str, made_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With codes of 4 bits, the flipped bit is one of the code in the high half of a byte. The
    source makes boxes one by one, several at once, or all.
    """
    monkeypatch.setattr(source_digests, "MADE_BYTES", made_bytes)
    trainer = new_trainer(weights=weights)
    verifier, held, traffic = verified(trainer, weights)
    spec = trainer.backend.scorer.model.spec
    coded, total = coded_shapes(spec, "e4m3"), spec.num_parameters
    num_coded = sum(rows * columns for rows, columns in coded.values())
    moved = sum(FORMATS[weights].num_bytes(shape) for shape in coded.values())
    assert traffic.copied_bytes == moved + 4 * (total - num_coded)
    name = sorted(coded)[0]
    held[name].local.view(torch.uint8)[3, 5] ^= 0x10
    proof = verifier.compare(None)
    assert (proof.num_unequal, [one.name for one in proof.mismatches]) == (1, [name])


def verified(trainer: Trainer, weights: str = "e4m3") -> tuple[Verifier, LocalTensors, Traffic]:
    """Push once to an engine's tensors, which then are equal.

    Returns what compares both sides, the tensors, and what was moved.
    """
    spec = trainer.backend.scorer.model.spec
    engine = CausalLM(spec).requires_grad_(False)
    hold_codes(engine, spec, weights)  # type: ignore[arg-type]
    held = LocalTensors.whole(dict(engine.named_parameters()))
    source = trainer.weight_source()
    sink = CopyingSink(held.items(), do_nothing, lambda version: None)
    ends = LocalEnds(0, source, sink, torch.device("cpu"))
    layouts = [[compressed(end.layout(0))] for end in (source, sink)]
    plan = plan_moves(*layouts, {0: 0}, 0)
    traffic = execute(plan.moves, ends, None)
    verifier = Verifier(plan.moves, (), ends)
    proof = verifier.compare(None)
    assert (proof.num_equal, proof.num_unequal, proof.num_unknown) == (len(held), 0, 0)
    return verifier, held, traffic
