"""Checks of a run's input in the launching process, before a worker starts or torch is imported."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from spmd_rl.check.golds import check_golds
from spmd_rl.check.vocabulary import check_vocabulary
from spmd_rl.data.documents import DocumentConfig, check_documents
from spmd_rl.data.files.files import open_records
from spmd_rl.data.files.record import DataRecord
from spmd_rl.data.mixture import data_weights
from spmd_rl.data.prompt_records import PromptConfig, graded, own_reward
from spmd_rl.data.render.prompt_format import PromptFormat, check_prompts
from spmd_rl.data.render.tokenizer import Tokenizer
from spmd_rl.data.render.turns import Learn
from spmd_rl.data.sft import check_sft
from spmd_rl.errors import ConfigError, DataError
from spmd_rl.hooks.config import HookConfig
from spmd_rl.hooks.signatures import check_hooks, load_reward, reward_weights
from spmd_rl.model.read import head_of, model_folder, read_spec
from spmd_rl.model.spec import ModelSpec
from spmd_rl.model.stored_adapters import stored_adapters
from spmd_rl.model.tokenizer import check_has_tokenizer, light_tokenizer
from spmd_rl.model.vocabulary import check_same_vocabulary
from spmd_rl.model.weight_files import stored_weights
from spmd_rl.rewards.config import GraderConfig
from spmd_rl.rewards.ready import check_graders, checked_graders
from spmd_rl.rollout.engine import SamplingConfig, check_stop_ids
from spmd_rl.rollout.grader_choice import all_rewards
from spmd_rl.train.balance import has_balance
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.optimizer.parameter_groups import update_rules

CHECKED_BYTES = 1 << 26  # of a data file; what follows is checked when it is drawn
CHECKED_GOLDS = 1000  # records of a data file of which the answer is parsed as graders do


def check_inputs(
    *,
    model: str,
    data: str | Mapping[str, float],
    reward: str | Mapping[str, float] = "",
    hooks: HookConfig | None = None,
    graders: GraderConfig | None = None,
    prompts: PromptFormat | None = None,
    trainer: TrainerConfig | None = None,
    sampling: SamplingConfig | None = None,
    documents: DocumentConfig | None = None,
    teacher: str = "",
    reward_model: str = "",
    learn: Learn | None = None,
) -> None:
    """Check the model's config and tokenizer, the records of the data, and all hooks.

    Of a data file, the first 64 MiB are checked. The shipped graders must be able to grade its
    first 1,000 records: an answer that is no mathematics, say, is refused. With `prompts`, each
    record must have their keys, a prompt of the right form, and no rewards but those that are
    loaded; the first ones are tokenised. With `learn` too, the data is supervised, and each record
    must have something to learn. With `trainer`, the model folder must have the weights that it
    starts from, by their headers, and a parameter for each pattern of names. Adapters that it
    starts from must fit the model. With `sampling`, the stop ids must be tokens of the model. With
    `graders`, those that `reward` names must be able to work with these settings on this host. With
    `documents`, the data is that of continued pre-training. A `teacher` or a `reward_model` must
    have the model's vocabulary, and the latter a value head.
    Raises: ConfigError or DataError, which names the first thing to correct.
    """
    paths = data_weights(data)
    spec = check_model(model, trainer=trainer)
    if sampling:
        check_stop_ids(sampling, spec.vocab_size)
    tokenizer = light_tokenizer(Path(model))
    for other in filter(None, (teacher, reward_model)):
        check_same_vocabulary(model, other)
        check_vocabulary(other, read_spec(model_folder(other)).vocab_size)
    if reward_model and head_of(reward_model) != "value":
        raise ConfigError(
            f"{reward_model} is no reward model: its config.json names no architecture for "
            "sequence classification; `spmd-rl run reward_model` trains one"
        )
    if documents:
        for path in paths:
            check_documents(path, documents, spec.max_positions, CHECKED_BYTES)
        return
    rewards = all_rewards(reward_weights(reward), hooks.extra_rewards if hooks else ())
    for path in paths:
        _check_records(path, prompts, tokenizer, set(rewards), learn)
    for name in reward_weights(reward):
        load_reward(name)
    if hooks:
        check_hooks(hooks)
        if hooks.pick_sources and len(paths) == 1:
            raise ConfigError("hooks.pick_sources weights several sources, but data has only one")
    if of_graders := graded(prompts):
        for path in paths:
            _check_golds(path, of_graders, reward_weights(reward))
    names = checked_graders(rewards)
    check_graders(names, graders or GraderConfig(), hooks.deadline_s if hooks else 0.0)


def check_model(model: str, *, trainer: TrainerConfig | None = None) -> ModelSpec:
    """Check a model's folder, and with `trainer` that it has what training starts from.

    The model must have a row for each token of its tokenizer.

    Raises: ConfigError or DataError, which names the first thing to correct.
    """
    if not model:
        raise ConfigError("--model is missing: name a Hugging Face folder")
    spec = read_spec(model)
    check_has_tokenizer(model)
    check_vocabulary(model, spec.vocab_size)
    if trainer:
        has_balance(spec, trainer)
        update_rules(trainer.lora.trained_shapes(spec), trainer, num_shards=1)
        if trainer.init == "folder":
            stored_weights(model, spec.parameter_shapes())
        if trainer.lora.folder:
            stored_adapters(trainer.lora, spec)
    return spec


def _check_records(
    path: str,
    prompts: PromptFormat | None,
    tokenizer: Tokenizer | None,
    rewards: Collection[str],
    learn: Learn | None,
) -> None:
    """Check the records of a file, in parts, so that they need not fit into memory."""
    records = open_records(path)
    for chunk in records.chunks(records.num_within(CHECKED_BYTES)):
        if prompts:
            _check_answers(chunk, prompts, learn)
            check_prompts(chunk, prompts, tokenizer)
        of_graders = graded(prompts)
        if of_graders and of_graders.reward_key:
            _check_rewards(chunk, of_graders, rewards)
        tokenizer = None  # only the first prompts are tokenised


def check_record(record: DataRecord, prompts: PromptFormat, learn: Learn | None) -> None:
    """Check the form of a record: a prompt, answers or turns to learn, and its own rewards.

    With `learn` the record is supervised. Raises: DataError, ConfigError.
    """
    _check_answers([record], prompts, learn)
    check_prompts([record], prompts, None)
    if of_graders := graded(prompts):
        own_reward(record, of_graders)


def _check_answers(
    records: Sequence[DataRecord], prompts: PromptFormat, learn: Learn | None
) -> None:
    """Raise a DataError unless every record has its answers, where the data has answers."""
    if learn and (supervised := graded(prompts)):
        check_sft(records, supervised, learn)
    for key in prompts.answer_keys:
        for record in records:
            prompts.check_answer(record, key)


def _check_golds(path: str, prompts: PromptConfig, rewards: Iterable[str]) -> None:
    records = open_records(path)
    num_checked = min(CHECKED_GOLDS, records.num_within(CHECKED_BYTES))
    for chunk in records.chunks(num_checked):
        check_golds(chunk, prompts, rewards)


def _check_rewards(
    records: Iterable[DataRecord], prompts: PromptConfig, rewards: Collection[str]
) -> None:
    """Raise a DataError for a record that names a reward function which is not loaded."""
    for record in records:
        for name in own_reward(record, prompts):
            if name not in rewards:
                loaded = ", ".join(sorted(rewards)) or "none"
                raise DataError(
                    f"{record.where}: {prompts.reward_key}",
                    f"it names the reward {name!r}, but only these are loaded: {loaded}: "
                    "add it to hooks.extra_rewards",
                )
