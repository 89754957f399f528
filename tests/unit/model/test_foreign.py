"""Models that transformers computes: packed samples against its own passes, one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from spmd_rl.algo.packing import pack_sft
from spmd_rl.errors import ConfigError
from spmd_rl.model.foreign.network import ForeignLM
from spmd_rl.model.foreign.scorer import ForeignScorer
from spmd_rl.model.foreign.weights import foreign_weights
from spmd_rl.model.hf import fill, save_folder
from spmd_rl.model.network import CausalLM
from spmd_rl.model.read import read_spec
from spmd_rl.model.tokenizer import load_tokenizer
from spmd_rl.train.microbatch import MicroBatch, lay_out
from tests.foreign_folders import CONFIGS, SIZES, reference, write_foreign_folder

CPU = torch.device("cpu")
LENGTHS = (5, 17, 2, 9)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    at = tmp_path_factory.mktemp("foreign")
    return {family: write_foreign_folder(at / family, family) for family in CONFIGS}


def loaded(model: str) -> ForeignLM:
    network = ForeignLM(read_spec(model), model).materialise(CPU, torch.float32)
    fill(network, foreign_weights(model))
    return network.requires_grad_(True)


def samples() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, 100, (length,), generator=generator) for length in LENGTHS]


def micro_batch() -> MicroBatch:
    """Return the samples, packed as supervised pairs: the first token of each is its prompt."""
    pairs = [(one.int().numpy(), np.arange(len(one)) > 0) for one in samples()]
    return lay_out(pack_sft(pairs), CPU, whole=True)


@pytest.mark.parametrize("family", CONFIGS)
def test_packed_samples_have_the_loss_and_gradients_of_transformers(
    family: str, models: dict[str, str]
) -> None:
    theirs, ours = reference(models[family]), loaded(models[family])
    scores = ForeignScorer(ours, logit_rows=7)(micro_batch())
    losses = []
    for one in samples():
        logits = theirs(input_ids=one[None]).logits[0, :-1]
        losses.append(F.cross_entropy(logits, one[1:], reduction="sum"))
    loss = torch.stack(losses).sum()
    torch.testing.assert_close(-scores.logprobs.sum(), loss, atol=1e-5, rtol=1e-6)
    loss.backward()
    (-scores.logprobs.sum()).backward()
    expected = dict(theirs.named_parameters())
    assert expected.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        if expected[name].grad is not None:
            torch.testing.assert_close(
                parameter.grad, expected[name].grad, atol=1e-5, rtol=1e-4, msg=name
            )


def test_a_sample_that_saw_another_would_have_other_logits(models: dict[str, str]) -> None:
    network, tokens = loaded(models["gemma3_text"]), torch.cat(samples())
    with torch.no_grad():
        apart = network.hidden_states(tokens, np.array(LENGTHS, np.int32))
        joined = network.hidden_states(tokens, np.array([sum(LENGTHS)], np.int32))
    assert torch.allclose(apart[: LENGTHS[0]], joined[: LENGTHS[0]], atol=1e-5)
    assert not torch.allclose(apart[LENGTHS[0] :], joined[LENGTHS[0] :], atol=1e-2)


@pytest.mark.parametrize("family", CONFIGS)
def test_decoding_with_a_cache_has_the_logits_of_a_whole_pass(
    family: str, models: dict[str, str]
) -> None:
    network, tokens = loaded(models[family]), samples()[1][None].repeat(2, 1)
    cache: Any = None
    with torch.no_grad():
        whole = network.logits(network.hidden_states(tokens[0], np.array([17], np.int32)))
        for start, end in ((0, 6), *((place, place + 1) for place in range(6, 17))):
            logits, cache = network.next_logits(tokens[:, start:end], cache)
            assert torch.allclose(logits, whole[end - 1].expand(2, -1), atol=1e-5)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_specification_has_the_shapes_of_the_network(
    family: str, models: dict[str, str]
) -> None:
    spec = read_spec(models[family])
    shapes = {name: tuple(one.shape) for name, one in reference(models[family]).named_parameters()}
    assert spec.parameter_shapes() == shapes
    assert spec.num_parameters == sum(map(np.prod, shapes.values()))
    assert (spec.impl, spec.num_layers, spec.max_positions) == ("transformers", 2, 256)
    assert (spec.vocab_size, spec.hidden_size, spec.eos_ids) == (104, 64, (1,))
    outer = {one.name for one in spec.outer_parameters()}
    assert outer and all(".h.0." not in name and "model.layers.1." not in name for name in outer)


@pytest.mark.parametrize("family", ["gemma3_text", "phi", "mixtral"])
def test_a_written_folder_has_the_weights_and_the_names_of_the_first(
    family: str, models: dict[str, str], tmp_path: Path
) -> None:
    model = models[family]
    changed = {name: one + 0.5 for name, one in foreign_weights(model)}
    save_folder(tmp_path / "hf", model, changed.items(), torch.bfloat16)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert again.dtype == torch.bfloat16
    for name, one in again.named_parameters():
        assert torch.equal(one, changed[name].bfloat16()), name
    first, written = (
        json.loads((folder / "config.json").read_text())
        for folder in (Path(model.removeprefix("transformers:")), tmp_path / "hf")
    )
    assert written == first | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    assert load_tokenizer(tmp_path / "hf").num_tokens("1+2=") == 4


def test_random_weights_follow_from_the_seed(models: dict[str, str]) -> None:
    first, again, other = (dict(foreign_weights(models["gemma3_text"], seed)) for seed in (3, 3, 4))
    matrix = "model.layers.0.mlp.up_proj.weight"
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first[matrix], other[matrix])


def test_our_own_families_can_be_computed_by_transformers_too(tmp_path: Path) -> None:
    model = write_foreign_folder(tmp_path, "qwen3", head_dim=16)
    assert read_spec(tmp_path).impl == "native"
    assert read_spec(model).parameter_shapes() == read_spec(tmp_path).parameter_shapes()


def test_the_tokenizer_knows_the_context_of_such_a_model(models: dict[str, str]) -> None:
    tokenizer = load_tokenizer(models["gemma3_text"])
    assert (tokenizer.context, tokenizer.config_eos_ids) == (256, (1,))


def test_an_unknown_family_is_refused_with_the_name_that_serves(models: dict[str, str]) -> None:
    model = models["gemma3_text"]
    with pytest.raises(ConfigError, match=f"'gemma3_text' is not one of .*--model={model} has"):
        read_spec(model.removeprefix("transformers:"))


def test_what_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model folder at"):
        read_spec(f"transformers:{tmp_path / 'none'}")
    for kind in ("no_such_type", "vit"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        with pytest.raises(ConfigError, match="transformers has no causal model for"):
            read_spec(f"transformers:{tmp_path}")


@pytest.mark.parametrize(
    ("family", "config", "sentence"),
    [
        ("phi", {"quantization_config": {"quant_method": "fp8"}}, "is quantized"),
        ("glm4_moe", {"n_routed_experts": 4}, "e_score_correction_bias, which is no parameter"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    family: str, config: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    model = {"model_type": family, "head_dim": 16} | SIZES | config
    (tmp_path / "config.json").write_text(json.dumps(model))
    with pytest.raises(ConfigError, match=sentence):
        read_spec(f"transformers:{tmp_path}")


def test_our_own_network_does_not_compute_such_a_model(models: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="our own network alone runs here"):
        CausalLM(read_spec(models["gemma3_text"]))


def test_a_folder_without_all_weights_is_refused(tmp_path: Path) -> None:
    model = write_foreign_folder(tmp_path, "phi")
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.fc1.bias"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 weights, first model.layers.1.mlp.fc1.bias"):
        dict(foreign_weights(model))
