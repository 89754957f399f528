"""Checks of a run's input in the launching process, before a worker starts or torch is imported."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from spmd_rl.check.vocabulary import check_vocabulary
from spmd_rl.config.combinations import ON, Combination, Condition, refuse
from spmd_rl.data.documents import DocumentConfig, check_documents
from spmd_rl.data.files.files import open_records
from spmd_rl.data.files.record import DataRecord
from spmd_rl.data.mixture import data_weights
from spmd_rl.data.prompt_records import PromptConfig, graded, graded_prompt, own_reward
from spmd_rl.data.render.prompt_format import PromptFormat, check_prompts
from spmd_rl.data.render.tokenizer import Tokenizer
from spmd_rl.data.render.turns import Learn
from spmd_rl.data.sft import check_sft
from spmd_rl.errors import ConfigError, DataError
from spmd_rl.evaluation.config import EvaluatedRecipe, eval_rewards, resolve_sets
from spmd_rl.hooks.config import HookConfig
from spmd_rl.hooks.signatures import check_hooks, load_reward, reward_weights
from spmd_rl.model.read import head_of, model_folder, read_spec
from spmd_rl.model.spec import ModelSpec
from spmd_rl.model.stored_adapters import stored_adapters
from spmd_rl.model.tokenizer import check_has_tokenizer, light_tokenizer
from spmd_rl.model.vocabulary import check_same_vocabulary
from spmd_rl.model.weight_files import stored_weights, weight_files
from spmd_rl.rewards.config import GraderConfig
from spmd_rl.rewards.gold import check_prompt
from spmd_rl.rewards.ready import check_graders, checked_graders
from spmd_rl.rollout.engine import SamplingConfig, check_stop_ids
from spmd_rl.rollout.grader_choice import all_rewards
from spmd_rl.train.balance import has_balance
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.optimizer.parameter_groups import update_rules

SOURCES_REFUSED = (
    Combination(
        {
            "hooks.pick_sources": ON,
            "data": Condition("a single file", lambda paths, _: len(paths) == 1),
        },
        "{0.key} weights several sources, but {1.key} has only one",
    ),
)
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
    tokenizer = light_tokenizer(model)
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
        refuse(SOURCES_REFUSED, {"hooks": hooks, "data": paths})
    if of_graders := graded(prompts):
        for records in map(open_records, paths):
            first = records.chunks(min(CHECKED_GOLDS, records.num_within(CHECKED_BYTES)))
            check_golds(chain.from_iterable(first), of_graders, reward_weights(reward))
    names = checked_graders(rewards)
    check_graders(names, graders or GraderConfig(), hooks.deadline_s if hooks else 0.0)


def check_evaluation(cfg: EvaluatedRecipe) -> None:
    """Check every set of `eval`: its settings, every record of its data, and its rewards.

    Raises: ConfigError or DataError, which names the first thing to correct.
    """
    sets = resolve_sets(cfg.eval, cfg.sampling, cfg.prompts)
    check_hooks(cfg.hooks)
    loaded = all_rewards(
        reward_weights(cfg.reward), [*cfg.hooks.extra_rewards, *eval_rewards(cfg.eval)]
    )
    for evaluated in sets:
        check_inputs(
            model=cfg.model,
            data=evaluated.data,
            reward=evaluated.reward or cfg.reward,
            hooks=replace(cfg.hooks, extra_rewards=tuple(loaded), pick_sources=""),
            graders=cfg.graders,
            prompts=evaluated.prompts,
            sampling=evaluated.sampling,
        )


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
        if trainer.init == "folder" and spec.impl == "native":
            stored_weights(model, spec.parameter_shapes())
        elif trainer.init == "folder":
            weight_files(model)  # whose tensors transformers names and converts
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


def check_golds(
    records: Iterable[DataRecord], prompts: PromptConfig, rewards: Iterable[str]
) -> None:
    """Check that the shipped graders among `rewards` can grade each record, or those that it names.

    Names are canonical. Raises: DataError, which names file, line and what is wrong.
    """
    names = [*rewards]
    for number, record in enumerate(records):
        graders = [*own_reward(record, prompts)] or names
        prompt = graded_prompt(record, prompts, number)
        try:
            check_prompt(prompt, graders)
        except DataError as error:
            field = error.where.rpartition(": ")[2]
            problem = str(error).removeprefix(f"{error.where}: ")
            raise DataError(f"{record.where}: {field}", problem) from error
        except ValueError as error:
            raise DataError(record.where, str(error)) from error


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
