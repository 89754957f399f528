"""Training with keys and values in 8 bits: the engine's bits, gradients, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from spmd_rl.algo.losses import grpo_loss
from spmd_rl.errors import ConfigError
from spmd_rl.kernels import PackedAttention
from spmd_rl.kernels.low_precision.kv_codes import round_kv
from spmd_rl.microscope.diagnose.compare import compare
from spmd_rl.microscope.diagnose.faults import auto_splits
from spmd_rl.microscope.replay.case import ReplayCase, ReplaySequence
from spmd_rl.microscope.replay.engine_pass import EnginePass
from spmd_rl.microscope.sides import forward_pass
from spmd_rl.model.families import FAMILIES
from spmd_rl.model.formats.coded_cache import require_keys
from spmd_rl.model.read import read_spec
from spmd_rl.rollout.kv_pages import cache_token_bytes
from spmd_rl.train import shared_prefix
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.megatron.config import MegatronConfig
from spmd_rl.train.trainer import Trainer
from tests.dist.train_case import make_batch, write_mixture_folder, write_model_folder
from tests.planted import family
from tests.unit.kernels.paged_case import Heads, qkv
from tests.unit.train.test_planted_layers import LATENT
from tests.unit.train.test_shared_prefix import group

CPU = torch.device("cpu")
EXPONENTS = (-1, -4)
NewTrainer = Callable[..., Trainer]


def coded(new_trainer: NewTrainer, **options: object) -> Trainer:
    return new_trainer(cache="e4m3", cache_exponents=EXPONENTS, **options)


def test_gradients_are_those_of_the_rounded_numbers() -> None:
    """As if keys and values had been these numbers from the first."""
    heads, lengths = Heads(4, 2, 16), np.array([30, 9])
    data = qkv(39, heads, dtype=torch.float32, device=CPU)
    leaves = [x.clone().requires_grad_() for x in data]
    q, k, v = data
    rounded = [x.clone().requires_grad_() for x in (q, round_kv(k, -1), round_kv(v, -4))]
    of_codes = PackedAttention(lengths, device=CPU, exponents=EXPONENTS)(0, *leaves)
    of_numbers = PackedAttention(lengths, device=CPU)(0, *rounded)
    assert torch.equal(of_codes, of_numbers)
    for out in (of_codes, of_numbers):
        out[:39].square().sum().backward()
    for x, y in zip(leaves, rounded, strict=True):
        assert x.grad is not None and torch.equal(x.grad, y.grad)


@pytest.mark.parametrize("options", [{"recompute": "cheap"}, {"recompute": "all"}])
def test_recomputation_changes_nothing(new_trainer: NewTrainer, options: dict[str, str]) -> None:
    found = [coded(new_trainer), coded(new_trainer, **options)]
    for seed in (0, 1):
        stats = [one.train_step(make_batch(seed), grpo_loss) for one in found]
        assert stats[0]["train/loss"] == stats[1]["train/loss"]
        assert stats[0]["train/grad_norm"] == stats[1]["train/grad_norm"] > 0
    plain = new_trainer().score(make_batch(0)).values
    assert not np.array_equal(coded(new_trainer).score(make_batch(0)).values, plain)


def test_a_shared_prompt_has_the_bits_of_whole_sequences(
    new_trainer: NewTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 50, size).tolist() for size in (1, 20, 70)]
    batch = group(prompts, [[3], [4, 5], [6]], copies=5)
    batch = replace(batch, advantages=batch.mask.astype(np.float32))
    trainer = coded(new_trainer)
    scores = trainer.learner.score(batch)
    monkeypatch.setattr("spmd_rl.train.shared_prefix.pack_shared", shared_prefix.pack_whole)
    other = coded(new_trainer).learner.score(batch)
    assert np.array_equal(other.view(np.int32), scores.view(np.int32))


def test_the_contract_says_how_keys_and_values_are_rounded(new_trainer: NewTrainer) -> None:
    fact = str(coded(new_trainer).numeric_contract()["cache"])
    assert "e4m3" in fact and "2^-1 of keys" in fact and "2^-4 of values" in fact
    assert "cache" not in new_trainer().numeric_contract()


@pytest.mark.parametrize("write", [write_model_folder, write_mixture_folder])
def test_the_microscope_replays_both_sides(
    new_trainer: NewTrainer, tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    new_trainer(model=write(tmp_path / "model")).export_hf(str(tmp_path / "hf"))
    rng = np.random.default_rng(0)
    drawn = [(rng.integers(2, 50, 9), rng.integers(2, 50, length)) for length in (4, 30)]
    case = ReplayCase(tuple(ReplaySequence(f"{n}:0", *one) for n, one in enumerate(drawn)))
    role = {"cache": "e4m3", "cache_exponents": list(EXPONENTS)}

    def sides(engine: dict[str, object], trainer: dict[str, object]) -> tuple[bool, EnginePass]:
        settings = {"engine": engine, "trainer": trainer}
        given = tmp_path / "hf", torch.float32, CPU, settings
        left, right = (forward_pass(name, *given) for name in ("engine", "trainer"))
        assert isinstance(left, EnginePass)
        return compare(left, right, case).agree, left

    agree, engine = sides(role, role)
    assert agree
    assert not sides(role, {})[0]
    with pytest.raises(ConfigError, match="codes"):
        auto_splits(engine)


def test_megatron_is_refused() -> None:
    with pytest.raises(ConfigError, match="Megatron-core does not round the keys"):
        TrainerConfig(cache="e4m3", backend=MegatronConfig())


def test_layers_that_keep_other_arrays_are_refused(
    new_trainer: NewTrainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(FAMILIES, "planted_moe", family.PLANTED)
    monkeypatch.setitem(FAMILIES, "planted_latent", LATENT)
    for name in ("planted_latent", "planted_moe"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(family.CONFIG | {"model_type": name}))
    spec = read_spec(tmp_path / "planted_latent")
    for build in (
        lambda: coded(new_trainer, model=tmp_path / "planted_latent"),
        lambda: cache_token_bytes(spec, 2, cache="e4m3"),
    ):
        with pytest.raises(ConfigError, match="keep other arrays"):
            build()
    require_keys(read_spec(tmp_path / "planted_moe"))
    trainer = coded(new_trainer, model=tmp_path / "planted_moe")
    assert trainer.train_step(make_batch(), grpo_loss)["train/grad_norm"] > 0
