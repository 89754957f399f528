"""Checks of a run's input in the launching process, before a worker starts or torch is imported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from spmd_rl.data.documents import DocumentConfig, check_documents
from spmd_rl.data.files import DataRecord, read_records
from spmd_rl.data.pairs import PairConfig, answer_text
from spmd_rl.data.prompt_format import PromptFormat, check_prompts
from spmd_rl.data.prompts import PromptConfig
from spmd_rl.data.sft import check_sft
from spmd_rl.data.turns import Learn
from spmd_rl.errors import ConfigError
from spmd_rl.hooks.config import HookConfig
from spmd_rl.hooks.signatures import check_hooks, load_reward, reward_weights
from spmd_rl.model.spec import ModelSpec, head_of
from spmd_rl.model.tokenizer import check_has_tokenizer, light_tokenizer
from spmd_rl.model.vocabulary import check_same_vocabulary
from spmd_rl.model.weight_files import stored_weights
from spmd_rl.rollout.engine import SamplingConfig, check_stop_ids
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.parameter_groups import update_rules


def check_inputs(
    *,
    model: str,
    data: str,
    reward: str | Mapping[str, float] = "",
    hooks: HookConfig | None = None,
    prompts: PromptFormat | None = None,
    trainer: TrainerConfig | None = None,
    sampling: SamplingConfig | None = None,
    documents: DocumentConfig | None = None,
    teacher: str = "",
    reward_model: str = "",
    learn: Learn | None = None,
) -> None:
    """Check the model's config and tokenizer, every record of the data, and all hooks.

    With `prompts`, each record must have their keys, and a prompt of the right form; the first ones
    are tokenised. With `learn` too, the data is supervised, and each record must have something to
    learn. With `trainer`, the model folder must have the weights that it starts from, by
    their headers, and a parameter for each pattern of names. With `sampling`, the stop ids must be
    tokens of the model. With `documents`, the data is that of continued pre-training. A `teacher`
    or a `reward_model` must have the model's vocabulary, and the latter a value head.
    Raises: ConfigError or DataError, which names the first thing to correct.
    """
    if not data:
        raise ConfigError("--data is missing: name a file")
    spec = check_model(model, trainer=trainer)
    if sampling:
        check_stop_ids(sampling, spec.vocab_size)
    tokenizer = light_tokenizer(Path(model))
    for other in filter(None, (teacher, reward_model)):
        check_same_vocabulary(model, other)
    if reward_model and head_of(reward_model) != "value":
        raise ConfigError(
            f"{reward_model} is no reward model: its config.json names no architecture for "
            "sequence classification; `spmd-rl run reward_model` trains one"
        )
    if documents:
        check_documents(data, documents, spec.max_positions)
        return
    records = read_records(data)
    if prompts:
        if learn and isinstance(prompts, PromptConfig):
            check_sft(records, prompts, learn)
        _check_answers(records, prompts)
        check_prompts(records, prompts, tokenizer)
    for name in reward_weights(reward):
        load_reward(name)
    if hooks:
        check_hooks(hooks)


def check_model(model: str, *, trainer: TrainerConfig | None = None) -> ModelSpec:
    """Check a model's folder, and with `trainer` that it has what training starts from.

    Raises: ConfigError or DataError, which names the first thing to correct.
    """
    if not model:
        raise ConfigError("--model is missing: name a Hugging Face folder")
    spec = ModelSpec.from_folder(model)
    check_has_tokenizer(model)
    if trainer:
        update_rules(spec.parameter_shapes(), trainer, num_shards=1)
        if trainer.init == "folder":
            stored_weights(model, spec.parameter_shapes())
    return spec


def _check_answers(records: Iterable[DataRecord], prompts: PromptFormat) -> None:
    """Raise a DataError unless every record has its answers, where the data has answers."""
    read = answer_text if isinstance(prompts, PairConfig) else DataRecord.text_or_number
    for key in prompts.answer_keys:
        for record in records:
            read(record, key)
