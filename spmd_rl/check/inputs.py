"""Checks of a run's input in the launching process, before a worker starts or torch is imported."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from spmd_rl.data.files import DataRecord, read_records
from spmd_rl.data.prompts import PromptConfig, check_prompts
from spmd_rl.errors import ConfigError
from spmd_rl.model.spec import ModelSpec
from spmd_rl.model.tokenizer import check_has_tokenizer, light_tokenizer
from spmd_rl.model.weight_files import stored_weights
from spmd_rl.rewards.load import resolve_reward
from spmd_rl.rollout.engine import SamplingConfig, check_stop_ids
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.parameter_groups import update_rules


def check_inputs(
    *,
    model: str,
    data: str,
    reward: str = "",
    prompts: PromptConfig | None = None,
    trainer: TrainerConfig | None = None,
    sampling: SamplingConfig | None = None,
) -> None:
    """Check the model's config and tokenizer, every record of the data, and the reward function.

    With `prompts`, each record must have their keys, and a prompt of the right form; the first ones
    are tokenised. With `trainer`, the model folder must have the weights that it starts from, by
    their headers, and a parameter for each pattern of names. With `sampling`, the stop ids must be
    tokens of the model.
    Raises: ConfigError or DataError, which names the first thing to correct.
    """
    if not model:
        raise ConfigError("--model is missing: name a Hugging Face folder")
    if not data:
        raise ConfigError("--data is missing: name a file")
    spec = ModelSpec.from_folder(model)
    if sampling:
        check_stop_ids(sampling, spec.vocab_size)
    check_has_tokenizer(model)
    tokenizer = light_tokenizer(Path(model))
    if trainer:
        update_rules(spec.parameter_shapes(), trainer, num_shards=1)
    if trainer and trainer.init == "folder":
        stored_weights(model, spec.parameter_shapes())
    records = read_records(data)
    if prompts:
        _check_answers(records, prompts.answer_key)
        check_prompts(records, prompts, tokenizer)
    if reward:
        resolve_reward(reward)


def _check_answers(records: Iterable[DataRecord], answer_key: str) -> None:
    """Raise a DataError unless every record has its answer, where the data has answers."""
    if answer_key:
        for record in records:
            record.text_or_number(answer_key)
