"""A trainer of a value head: its gradient, its folder, its checkpoint, and rewards of sequences."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from spmd_rl.algo.dpo import bradley_terry_loss
from spmd_rl.algo.losses import LossInput, ValueInput
from spmd_rl.algo.pair_packing import pack_pairs
from spmd_rl.data.pairs import PairConfig, PreferencePairs
from spmd_rl.errors import ConfigError, ContractError
from spmd_rl.kernels import PackedAttention
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.model.hf import model_weights, random_weights, save_folder
from spmd_rl.model.read import head_of, read_spec
from spmd_rl.model.spec import VALUE_HEAD
from spmd_rl.model.tokenizer import load_tokenizer
from spmd_rl.model.value_head import ValueModel
from spmd_rl.train.checkpoint.export import export_saved
from spmd_rl.train.config import FrozenConfig, TrainerConfig
from spmd_rl.train.frozen import FrozenModel
from spmd_rl.train.value_trainer import ValueTrainer
from spmd_rl.types.batch import Batch
from spmd_rl.types.sequence_ends import sequence_ends
from tests.dist.train_case import local_weights, make_batch
from tests.unit.data.chat_templates import CHATML, tokenizer_of

NewCritic = Callable[..., ValueTrainer]


@pytest.fixture
def new_critic(context: RoleContext, model_folder: Path) -> NewCritic:
    def build(**options: object) -> ValueTrainer:
        model = str(options.pop("model", model_folder))
        defaults = {"init": "random", "lr": 1e-2, "eps": 1e-4}
        return ValueTrainer(TrainerConfig(**(defaults | options)), context, model)

    return build


def squares(out: ValueInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Half the square of the distance to the column "returns"."""
    error = out.values - out.columns["returns"]
    return 0.5 * error**2, {"train/value": out.values}


def with_returns(batch: Batch) -> Batch:
    drawn = np.random.default_rng(3).normal(1, 1, batch.num_tokens).astype(np.float32)
    return batch.with_columns(returns=np.where(batch.mask, drawn, 0).astype(np.float32))


def bits(trainer: ValueTrainer) -> dict[str, bytes]:
    return {
        name: one.local.detach().numpy().tobytes() for name, one in local_weights(trainer).items()
    }


def plain_model(critic: ValueTrainer) -> ValueModel:
    """The critic's weights in a model that nothing shards."""
    model = ValueModel(read_spec(critic.model))
    model.load_state_dict({name: one.local.detach() for name, one in local_weights(critic).items()})
    return model


def plain_values(model: ValueModel, batch: Batch) -> torch.Tensor:
    """Sequence by sequence, the values of the states before the tokens of the mask."""
    values = []
    ends = np.cumsum(batch.lengths)
    for start, end in zip(ends - batch.lengths, ends, strict=True):
        tokens = torch.from_numpy(batch.tokens[start:end]).long()
        attend = PackedAttention(np.array([len(tokens)]), device=tokens.device)
        hidden = model(tokens, torch.arange(len(tokens)), attend).double()
        of_states = hidden @ model.score.weight.double()[0]
        values.append(of_states[np.flatnonzero(batch.mask[start:end]) - 1])
    return torch.cat(values)


def test_values_are_zero_at_first_and_then_learn(new_critic) -> None:
    critic, batch = new_critic(), with_returns(make_batch())
    assert not critic.values(batch).values.any()
    losses = [critic.train_step(batch, squares)["train/loss"] for _ in range(12)]
    assert losses[-1] < 0.5 * losses[0]
    assert critic.version() == 12


def test_values_are_of_the_state_before_each_token(new_critic) -> None:
    critic, batch = new_critic(max_tokens=60), with_returns(make_batch())
    for _ in range(2):
        stats = critic.train_step(batch, squares)
    expected = plain_values(plain_model(critic), batch).detach().numpy()
    values = critic.values(batch)
    np.testing.assert_allclose(values.values[batch.mask], expected, rtol=1e-5, atol=1e-6)
    assert not values.values[~batch.mask].any()
    assert stats["train/value"] != 0


def test_the_gradient_is_that_of_plain_autograd(new_critic) -> None:
    critic, batch = new_critic(clip_norm=0.0), with_returns(make_batch())
    critic.train_step(batch, squares)  # so that the head is not zero
    model = plain_model(critic)
    stats = critic.train_step(batch, squares)
    returns = torch.from_numpy(batch.columns["returns"][batch.mask])
    weight = torch.from_numpy(batch.weight[batch.mask])
    errors = plain_values(model, batch) - returns
    loss = (0.5 * errors**2 * weight).sum() / batch.denominator
    loss.backward()
    assert stats["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    norm = torch.nn.utils.get_total_norm([one.grad for one in model.parameters()])
    assert stats["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert model.score.weight.grad.abs().max() > 0


def test_an_exported_folder_loads_again_and_in_transformers(
    new_critic, model_folder: Path, tmp_path: Path
) -> None:
    """With `AutoModelForSequenceClassification`, which reads the state at the last token."""
    critic, batch = new_critic(), make_batch()
    for _ in range(2):
        critic.train_step(with_returns(batch), squares)
    critic.export_hf(str(tmp_path / "hf"))
    assert head_of(tmp_path / "hf") == "value"
    assert head_of(model_folder) == "lm"
    critic.save(str(tmp_path / "saved"))
    critic.wait_until_saved()
    export_saved(tmp_path / "saved", model_folder, tmp_path / "again")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "hf" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()
    loaded = new_critic(init="folder", model=tmp_path / "hf")
    assert bits(loaded) == bits(critic)
    expected = critic.rewards(batch)
    frozen = FrozenModel(FrozenConfig(), critic.context, str(tmp_path / "hf"))
    assert np.array_equal(frozen.rewards(batch).values, expected.values)
    assert np.array_equal(frozen.values(batch).values, critic.values(batch).values)
    with pytest.raises(ContractError, match="a model with a value head has no log-probs"):
        frozen.score(batch)
    with pytest.raises(ContractError, match="a model with a value head has no log-probs"):
        frozen.top_logprobs(batch, 2)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    ends = np.cumsum(batch.lengths)
    with torch.no_grad():
        theirs = [
            float(model(torch.from_numpy(batch.tokens[start:end]).long()[None]).logits)
            for start, end in zip(ends - batch.lengths, ends, strict=True)
        ]
    np.testing.assert_allclose(expected.values, theirs, rtol=1e-4, atol=1e-5)
    assert np.ptp(theirs) > 0.01


@pytest.mark.parametrize("templated", [True, False])
def test_transformers_scores_the_same_text(
    new_critic, model_folder: Path, tmp_path: Path, templated: bool
) -> None:
    """As docs/algorithms.md shows, also where the end-of-text token is the padding."""
    tokenizer, folder = tokenizer_of(CHATML), tmp_path / "model"
    config = json.loads((model_folder / "config.json").read_text())
    config |= {"vocab_size": 400, "eos_token_id": tokenizer.eos_token_id}
    config["pad_token_id"] = tokenizer.eos_token_id
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(str(folder))
    rows = [{"prompt": f"the {n}", "chosen": "cat " * n, "rejected": "hat"} for n in range(1, 5)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = PairConfig(chat_template=templated, shuffle=False)
    pairs = PreferencePairs(
        str(tmp_path / "pairs.jsonl"), cfg, load_tokenizer(folder), for_reward_model=True
    ).next(4)
    critic, batch = new_critic(model=folder), pack_pairs(pairs)
    for _ in range(3):
        critic.train_step(sequence_ends(batch), bradley_terry_loss)
    critic.export_hf(str(tmp_path / "hf"))

    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")

    def score(prompt: str, answer: str, end: str = "") -> float:
        ids = theirs(prompt + answer + theirs.eos_token, return_tensors="pt")["input_ids"]
        if templated:
            messages = [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": answer},
            ]
            text = theirs.apply_chat_template(messages, tokenize=False)
            ids = theirs(text.removesuffix(end), add_special_tokens=False, return_tensors="pt")
            ids = ids["input_ids"]
        with torch.no_grad():
            return float(model(ids).logits)

    expected = critic.rewards(batch).values
    found = [score(row["prompt"], row[key]) for row in rows for key in ("chosen", "rejected")]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    if templated:  # the control: before the line break another score is read
        other = score(rows[0]["prompt"], rows[0]["chosen"], end="\n")
        assert abs(other - expected[0]) > 1e-3


def test_a_language_model_refuses_the_folder_of_a_value_model(
    new_critic, new_trainer, tmp_path: Path
) -> None:
    new_critic().export_hf(str(tmp_path / "hf"))
    with pytest.raises(ConfigError, match=rf"holds {VALUE_HEAD}, which the model"):
        new_trainer(init="folder", model=tmp_path / "hf")


def test_a_reward_model_must_have_its_head(model_folder: Path, context, tmp_path: Path) -> None:
    spec = read_spec(model_folder)
    save_folder(tmp_path / "hf", model_folder, random_weights(spec, 3), head="value")
    with pytest.raises(ConfigError, match=rf"lacks 1 weights of its config, first {VALUE_HEAD}"):
        FrozenModel(FrozenConfig(), context, str(tmp_path / "hf"))


def test_a_head_of_several_labels_is_refused(model_folder: Path, tmp_path: Path) -> None:
    spec = read_spec(model_folder)
    weights = dict(random_weights(spec, 3, "value")) | {VALUE_HEAD: torch.zeros(2, 36)}
    save_folder(tmp_path / "hf", model_folder, weights.items(), head="value")
    with pytest.raises(ConfigError, match=r"is \[2, 36\], and the config asks for \[1, 36\]"):
        list(model_weights(tmp_path / "hf", spec.parameter_shapes("value")))


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_of_a_language_model_is_left_out(
    model_folder: Path, tmp_path: Path, tied: bool
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads((model_folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    spec = read_spec(folder)
    save_folder(tmp_path / "hf", folder, random_weights(spec, 3))
    found = dict(model_weights(tmp_path / "hf", spec.parameter_shapes("value")))
    expected = dict(random_weights(spec, 3, "value"))
    assert found.keys() == expected.keys() == spec.parameter_shapes("value").keys()
    assert all(torch.equal(found[name], one) for name, one in expected.items())


def test_one_number_a_sequence_can_be_learned(new_critic) -> None:
    """As a reward model does: pairs stay together, and a loss sees both ends."""
    critic = new_critic(max_tokens=60)
    batch = sequence_ends(replace(make_batch(), unit=2))
    seen = []

    def pairs(out: ValueInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert torch.equal(out.sequence, torch.arange(out.num_sequences))
        chosen, rejected = out.values[::2], out.values[1::2]
        seen.append(len(chosen))
        loss = torch.zeros_like(out.values)
        loss[::2] = -torch.nn.functional.logsigmoid(chosen - rejected)
        return loss, {}

    first = critic.train_step(batch, pairs)["train/loss"]
    assert first == pytest.approx(np.log(2), rel=1e-5)
    assert sum(seen) == batch.num_sequences // 2
    for _ in range(10):
        last = critic.train_step(batch, pairs)["train/loss"]
    assert last < 0.5 * first


def test_a_loss_of_log_probs_is_not_given_values(new_critic) -> None:
    def loss(out: LossInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -out.logprobs, {}

    with pytest.raises(AttributeError, match="logprobs"):
        new_critic().train_step(make_batch(), loss)
