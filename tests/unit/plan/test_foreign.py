"""What does not go with a model that transformers computes, and the plan of one, before ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from spmd_rl.check.inputs import check_model
from spmd_rl.errors import ConfigError, SpmdError
from spmd_rl.model.read import read_spec
from spmd_rl.plan.command import main
from spmd_rl.train.config import TrainerConfig
from tests.foreign_folders import write_foreign_folder

WITH = "does not go with a model that transformers computes"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_foreign_folder(tmp_path_factory.mktemp("foreign"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--split.train.tp=2", f"split.train.tp = 2 {WITH}"),
        ("--split.train.cp=2", f"split.train.cp = 2 {WITH}"),
        ("--split.train.ep=2", f"split.train.ep = 2 {WITH}"),
        ("--split.infer.tp=2", "the plain engine has the axes dp and fsdp alone"),
        ("--run.row_shards=2", f"run.row_shards = 2 {WITH}"),
        ("--trainer.lora.rank=4", f"trainer.lora.rank = 4 {WITH}"),
        ("--trainer.weights=int4", f"trainer.weights = 'int4' {WITH}"),
        ("--trainer.cache=e4m3", f"trainer.cache = 'e4m3' {WITH}"),
        ("--trainer.deterministic=true", f"trainer.deterministic = True {WITH}"),
        ("--trainer.optimizer.kind=muon", f"trainer.optimizer.kind = 'muon' {WITH}"),
        ("--trainer.backend.recompute=cheap", f"trainer.backend.recompute = 'cheap' {WITH}"),
        ("--trainer.backend.kind=megatron", f"trainer.backend.kind = 'megatron' {WITH}"),
        ("--sampling.replay_routes=true", f"sampling.replay_routes = True {WITH}"),
        ("--algorithm=ppo", f"model.head = 'value' {WITH}"),
        ("--engine.kind=sglang", "engine.kind = 'sglang' does not compute a model of transformers"),
        ("--engine.weights=int4", "engine.weights = 'int4' is for engine.kind = 'native'"),
    ],
)
def test_what_is_not_built_is_refused(words: str, sentence: str, model: str) -> None:
    with pytest.raises(SpmdError) as raised:
        main(["grpo", f"--model={model}", words, "--run.exact=false", "--world=2"])
    assert sentence in str(raised.value)


def test_the_plain_engine_is_for_such_models_alone(model: str) -> None:
    native = Path(__file__).parents[3] / "examples/arithmetic/model"
    with pytest.raises(ConfigError, match=r"or name the model as transformers:PATH"):
        main(["grpo", f"--model={native}", "--engine.kind=plain", "--world=1"])


@pytest.mark.parametrize("recipe", ["sft", "dpo", "grpo"])
def test_the_plan_says_what_is_estimated(
    recipe: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([recipe, f"--model={model}", "--world=2", "--gpu-gib=80"]) == 0
    printed = capsys.readouterr().out
    count = f"{read_spec(model).num_parameters:,}"
    assert f"model        gemma3_text, {count} parameters\nestimates    are all" in printed
    assert "fits in 80 GiB" in printed


def test_a_run_without_weights_is_refused_unless_they_are_random(
    model: str, tmp_path: Path
) -> None:
    bare = f"transformers:{tmp_path}"
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(model.removeprefix("transformers:")) / name, tmp_path)
    with pytest.raises(ConfigError, match="holds no weights"):
        check_model(bare, trainer=TrainerConfig())
    assert check_model(bare, trainer=TrainerConfig(init="random")).impl == "transformers"
    assert check_model(model, trainer=TrainerConfig()).impl == "transformers"
