"""A trainer of adapters: what changes, what is pushed and saved, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from spmd_rl.algo.losses import grpo_loss
from spmd_rl.errors import ConfigError, ContractError
from spmd_rl.kernels import PackedAttention
from spmd_rl.model.hf import random_weights, save_folder
from spmd_rl.model.lora import LoraConfig, is_adapter
from spmd_rl.model.network import CausalLM
from spmd_rl.model.read import read_spec
from spmd_rl.offload.phases import ALL, RoleSleep
from spmd_rl.train.checkpoint.export import export_saved
from spmd_rl.train.command import main as export
from spmd_rl.train.config import Fsdp2Config, OptimizerConfig, ParameterGroup, TrainerConfig
from spmd_rl.train.trainer import Trainer
from tests.dist.recipes.mixtures import write_mixture
from tests.dist.train_case import make_batch

LORA = LoraConfig(rank=4)


def bits(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in trainer.backend.parameters.items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "recompute": "all", "wrap": "layer"},
        {"recompute": "cheap"},
        {"offload_activations": True},
    ],
)
def test_adapters_alone_change(new_trainer, options: dict[str, object]) -> None:
    trainer = new_trainer(lora=LORA, **options)
    before, batch = bits(trainer), make_batch()
    batch = replace(batch, rollout_logprobs=trainer.learner.score(batch))
    first = trainer.train_step(batch, grpo_loss)
    assert first["onpolicy/mismatched_tokens"] == 0
    for seed in range(2):
        trainer.train_step(make_batch(seed), grpo_loss)
    after = bits(trainer)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == set(LORA.shapes(read_spec(trainer.model)))
    dtypes = {is_adapter(name): str(one.dtype) for name, one in after.items()}
    assert dtypes == {True: "torch.float32", False: f"torch.{options.get('dtype', 'float32')}"}
    kinds = {kind: {name for name, _ in of} for kind, of in trainer.backend.state().items()}
    assert kinds == dict.fromkeys(("weights", "exp_avg", "exp_avg_sq"), changed)
    assert {piece.name for piece in trainer.weight_source().layout(0).pieces} == changed


def test_the_first_log_probs_are_the_bases(new_trainer) -> None:
    batch = make_batch()
    adapted, plain = new_trainer(lora=LORA), new_trainer()
    scores = [trainer.learner.score(batch).view(np.int32) for trainer in (adapted, plain)]
    np.testing.assert_array_equal(*scores)
    assert np.any(scores[0])


def test_a_trainer_without_adapters_has_no_base(new_trainer) -> None:
    with pytest.raises(ContractError, match="set trainer.lora.rank"):
        new_trainer().score_base(make_batch())


def test_the_first_step_follows_the_gradient_of_plain_autograd(new_trainer) -> None:
    """With B = 0, AdamW's first step moves each element of B by the rate, against its gradient."""
    trainer, batch = new_trainer(lora=LORA, lr=1e-3, eps=1e-12, clip_norm=0.0), make_batch()
    spec = read_spec(trainer.model)
    model = CausalLM(spec, LORA)
    model.load_state_dict({name: trainer.backend.gather(name) for name in dict(bits(trainer))})
    trainer.train_step(batch, grpo_loss)
    lengths = batch.lengths
    attend = PackedAttention(lengths, device=torch.device("cpu"))
    positions = torch.cat([torch.arange(int(n)) for n in lengths])
    there = np.flatnonzero(batch.mask)
    tokens = torch.from_numpy(batch.tokens).long()
    logits = model(tokens, positions, attend, torch.from_numpy(there - 1)).double()
    temperatures = np.repeat(np.where(batch.temperature == 0, 1, batch.temperature), lengths)
    scaled = logits / torch.from_numpy(temperatures[there, None])
    logprobs = scaled.log_softmax(-1).gather(1, tokens[there, None]).squeeze(1)
    (-torch.from_numpy(batch.advantages[there]) * logprobs).sum().backward()
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            assert parameter.grad is not None
            large = parameter.grad.abs() > 1e-3 * parameter.grad.abs().max()
            moved = trainer.backend.gather(name).detach()
            expected = -1e-3 * parameter.grad.sign()
            torch.testing.assert_close(moved[large], expected[large], rtol=1e-3, atol=1e-7)


def test_a_checkpoint_is_adapters_and_goes_on_bit_for_bit(new_trainer, tmp_path: Path) -> None:
    trainer = new_trainer(lora=LORA)
    trainer.train_step(make_batch(0), grpo_loss)
    trainer.save(str(tmp_path / "saved"))
    trainer.wait_until_saved()
    trainer.train_step(make_batch(1), grpo_loss)
    again = new_trainer(lora=LORA)
    again.load(str(tmp_path / "saved"))
    assert again.resume_differences() == []
    again.train_step(make_batch(1), grpo_loss)
    expected = bits(trainer)
    assert all(torch.equal(one, expected[name]) for name, one in bits(again).items())
    num_bytes = sum(p.stat().st_size for p in (tmp_path / "saved").glob("weights*"))
    adapter_bytes = 4 * sum(one.numel() for name, one in expected.items() if is_adapter(name))
    assert adapter_bytes < num_bytes < adapter_bytes * 1.5
    for options, key in (
        ({"lora": LORA, "seed": 7}, "base_weights"),
        ({"lora": replace(LORA, alpha=8.0)}, "lora"),
    ):
        with pytest.raises(ConfigError, match=f"another kind or base: its {key} is"):
            new_trainer(**options).load(str(tmp_path / "saved"))
    wide = new_trainer(lora=LORA, dtype="bfloat16")
    wide.load(str(tmp_path / "saved"))
    assert "dtype is" in wide.resume_differences()[0]


def test_an_exported_folder_is_pefts(new_trainer, tmp_path: Path) -> None:
    trainer = new_trainer(lora=LORA)
    trainer.train_step(make_batch(), grpo_loss)
    trainer.export_hf(str(tmp_path / "live"))
    config = json.loads((tmp_path / "live/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 32.0, "LORA")
    stored = load_file(tmp_path / "live/adapter_model.safetensors")
    prefix = "base_model.model."
    expected = {prefix + name: trainer.backend.gather(name) for name in trainer.backend.names()}
    assert stored.keys() == expected.keys()
    assert all(torch.equal(one, expected[name]) for name, one in stored.items())
    trainer.save(str(tmp_path / "saved"))
    trainer.wait_until_saved()
    export_saved(tmp_path / "saved", trainer.model, tmp_path / "from_saved")
    files = ("adapter_config.json", "adapter_model.safetensors")
    one, other = (
        [(tmp_path / name / file).read_bytes() for file in files] for name in ("live", "from_saved")
    )
    assert one == other


@pytest.mark.parametrize("init", ["folder", "random"])
def test_merged_weights_are_those_of_base_and_adapters(
    new_trainer, tmp_path: Path, init: str
) -> None:
    base = tmp_path / "base"
    save_folder(base, new_trainer().model, random_weights(read_spec(new_trainer().model), 3))
    trainer = new_trainer(lora=LORA, model=base, init=init, seed=5)
    for name, one in trainer.backend.parameters.items():
        if name.endswith("lora_B.weight"):
            one.data.normal_(std=0.2, generator=torch.Generator().manual_seed(len(name)))
    saved = tmp_path / "run/checkpoints/step_000001/trainer"
    trainer.save(str(saved))
    trainer.wait_until_saved()
    (saved.parent / "state.json").write_text(
        '{"next_step": 1, "seed": 0, "roles": {"trainer": {}}}'
    )
    (tmp_path / "run/config.toml").write_text(
        f'model = "{base}"\n[trainer]\ninit = "{init}"\nseed = 5\n'
    )
    assert export([str(tmp_path / "run"), str(tmp_path / "merged"), "--merge"]) == 0
    found = load_file(tmp_path / "merged/model.safetensors")
    spec, adapters = (
        read_spec(base),
        {n: trainer.backend.gather(n) for n in trainer.backend.names()},
    )
    weights = dict(random_weights(spec, 5 if init == "random" else 3))
    assert found.keys() == spec.parameter_shapes().keys()
    changed = 0
    for name, one in found.items():
        layer, expected = name.removesuffix(".weight"), weights[name].double()
        if (b := adapters.get(f"{layer}.lora_B.weight")) is not None:
            a = adapters[f"{layer}.lora_A.weight"]
            expected = expected + LORA.scale * b.double() @ a.double()
            changed += 1
        torch.testing.assert_close(one.double(), expected, rtol=1e-6, atol=1e-6)
    assert changed == len(adapters) / 2
    card = (tmp_path / "merged/README.md").read_text()
    assert "library_name: transformers" in card and "are merged into the weights" in card


def test_what_peft_would_drop_is_merged_or_refused(
    new_trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of this model, the first layer is dense, and all tokens take a shared expert."""
    base = write_mixture(tmp_path / "base", "glm4_moe", {"num_hidden_layers": 2})
    trainer = new_trainer(lora=LORA, model=base, init="folder")
    trainer.export_hf(str(tmp_path / "hf"))
    assert "PEFT would drop some of these adapters" in capsys.readouterr().out
    whole = load_file(tmp_path / "hf/model.safetensors")  # B is zero yet
    first = load_file(base / "model.safetensors")
    assert all(torch.equal(one, first[name]) for name, one in whole.items())
    assert "are merged into the weights" in (tmp_path / "hf/README.md").read_text()
    trainer.save(str(tmp_path / "saved"))
    trainer.wait_until_saved()
    with pytest.raises(ConfigError, match=r"PEFT would drop .* --merge"):
        export_saved(tmp_path / "saved", base, tmp_path / "adapters")
    assert not (tmp_path / "adapters").exists()
    export_saved(tmp_path / "saved", base, tmp_path / "merged", merge=True)
    attention = replace(LORA, targets=("q_proj", "v_proj"))
    new_trainer(lora=attention, model=base, init="folder").export_hf(str(tmp_path / "peft"))
    assert (tmp_path / "peft/adapter_config.json").is_file()


def test_weights_without_adapters_are_not_merged(new_trainer, tmp_path: Path) -> None:
    trainer = new_trainer()
    trainer.save(str(tmp_path / "saved"))
    trainer.wait_until_saved()
    with pytest.raises(ConfigError, match="holds no adapters to merge: leave --merge out"):
        export_saved(tmp_path / "saved", trainer.model, tmp_path / "merged", merge=True)


def test_an_exported_folder_loads_from_anywhere(
    new_trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = new_trainer(lora=LORA)
    trainer.save(str(tmp_path / "saved"))
    trainer.wait_until_saved()
    spec = read_spec(trainer.model)
    save_folder(tmp_path / "m/base", trainer.model, random_weights(spec, 0))
    monkeypatch.chdir(tmp_path)
    export_saved("saved", "m/base", "adapter")
    monkeypatch.chdir("/")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "m/base")
    peft = pytest.importorskip("peft")
    peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")


@pytest.mark.parametrize("targets", [("all-linear",), ("v_proj", "q_proj", "down_proj")])
def test_a_trainer_begins_with_exported_adapters(
    new_trainer, tmp_path: Path, targets: tuple[str, ...]
) -> None:
    lora, batch = replace(LORA, alpha=7.0, targets=targets), make_batch(1)
    trainer = new_trainer(lora=lora)
    first = bits(trainer)
    trainer.train_step(make_batch(), grpo_loss)
    trainer.export_hf(str(tmp_path / "adapters"))
    again = new_trainer(lora=replace(lora, folder=str(tmp_path / "adapters")))
    expected = bits(trainer)
    assert all(torch.equal(one, expected[name]) for name, one in bits(again).items())
    assert any(not torch.equal(one, expected[name]) for name, one in first.items())
    scores = [one.learner.score(batch).view(np.int32) for one in (trainer, again)]
    np.testing.assert_array_equal(*scores)
    assert again.numeric_contract() == trainer.numeric_contract()


def test_a_trainer_begins_with_what_peft_wrote(new_trainer, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    import transformers

    model = new_trainer().model
    base = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(model)
    )
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "up_proj"],
        init_lora_weights=False,  # B is random too
        task_type="CAUSAL_LM",
        lora_dropout=0.1,
    )
    written = peft.get_peft_model(base, config)
    written.save_pretrained(tmp_path / "adapters")
    lora = LoraConfig(4, 8.0, ("q_proj", "up_proj"), str(tmp_path / "adapters"))
    backend = new_trainer(lora=lora).backend
    found = {name: backend.gather(name) for name in backend.names()}
    theirs = {
        name.removeprefix("base_model.model.").replace(".default", ""): one
        for name, one in written.named_parameters()
        if ".lora_" in name
    }
    assert found.keys() == theirs.keys()
    assert all(torch.equal(one, theirs[name]) for name, one in found.items())


def test_peft_computes_the_same_logits(new_trainer, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    import transformers

    trainer = new_trainer(lora=LORA)
    for seed in range(3):
        trainer.train_step(make_batch(seed), grpo_loss)
    trainer.export_hf(str(tmp_path / "adapter"))
    spec = read_spec(trainer.model)
    config = transformers.AutoConfig.from_pretrained(trainer.model)
    base = transformers.AutoModelForCausalLM.from_config(config).eval()
    base.load_state_dict(dict(random_weights(spec, 0)))
    ours = CausalLM(spec, LORA)
    ours.load_state_dict({name: trainer.backend.gather(name) for name in bits(trainer)})
    tokens = torch.arange(40) % spec.vocab_size
    attend = PackedAttention(np.array([40], np.int32), device=tokens.device)
    with torch.no_grad():
        without = base(tokens[None]).logits[0]
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")(tokens[None]).logits[0]
        own = ours(tokens, torch.arange(40), attend, torch.arange(40))
    torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-4)
    assert (without - theirs).abs().max() > 0.01, "adapters matter"


def test_the_base_sleeps_while_adapters_are_pushed(new_trainer, context, model_folder) -> None:
    """And its bytes are copied to the host once, as they never change."""
    cfg = TrainerConfig(init="random", lr=1e-2, lora=LORA)
    sleep = RoleSleep("train", {"sync": ("master",), "rollout": (), "train": ALL})
    trainer, plain = (
        Trainer(cfg, context, str(model_folder), sleep),
        new_trainer(lora=LORA, lr=1e-2),
    )
    copied = []
    for seed in range(3):
        receipt = trainer.sleep()[0]
        copied.append(receipt.copied_bytes)
        trainer.wake(("master",))
        assert trainer.weight_source().layout(0).pieces
        trainer.wake()
        losses = [
            one.train_step(make_batch(seed), grpo_loss)["train/loss"] for one in (trainer, plain)
        ]
        assert losses[0] == losses[1]
    base_bytes = sum(trainer.backend.local[name].nbytes for name in trainer.backend.base)
    assert copied[0] - copied[1] == base_bytes
    assert copied[1] == copied[2] > 0


def test_groups_name_adapters(new_trainer) -> None:
    """As LoRA+ has it: another rate for B."""
    group = ParameterGroup("*.lora_B.weight", lr_scale=0.0)
    trainer = new_trainer(lora=LORA, groups=(group,))
    before = bits(trainer)
    trainer.train_step(make_batch(), grpo_loss)
    trainer.train_step(make_batch(), grpo_loss)
    after = bits(trainer)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"optimizer": OptimizerConfig(kind="muon")}, "optimizer.kind"),
        ({"backend": Fsdp2Config(offload="moments")}, "backend.offload"),
        ({"freeze": ("model.norm.weight",)}, "freeze"),
    ],
)
def test_what_adapters_do_not_go_with_is_refused(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named} = "):
        TrainerConfig(lora=LORA, **settings)
