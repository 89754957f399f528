"""Input that can be refused in the launching process, before a worker starts or torch is imported."""

from __future__ import annotations

from spmd_rl.data.files import read_records
from spmd_rl.data.prompts import PromptConfig, prompt_of
from spmd_rl.errors import ConfigError
from spmd_rl.model.spec import ModelSpec, weight_files
from spmd_rl.model.tokenizer import check_has_tokenizer
from spmd_rl.rewards.load import resolve_reward
from spmd_rl.rollout.engine import SamplingConfig, check_stop_ids
from spmd_rl.train.config import TrainerConfig


def check_inputs(
    *,
    model: str,
    data: str,
    reward: str = "",
    prompts: PromptConfig | None = None,
    trainer: TrainerConfig | None = None,
    sampling: SamplingConfig | None = None,
) -> None:
    """Read the model's config, every record of the data and the reward function's signature; look for a tokenizer.

    With `prompts`, each record must have the keys that they are made of; with `trainer`, the folder the weights that it
    begins with; with `sampling`, the model the ids that end a sample.
    Raises: ConfigError or DataError with the one thing to mend.
    """
    for flag, value in (("--model", model), ("--data", data)):
        if not value:
            raise ConfigError(f"{flag} is missing: name a {'Hugging Face folder' if flag == '--model' else 'file'}")
    spec = ModelSpec.from_folder(model)
    if sampling:
        check_stop_ids(sampling, spec.vocab_size)
    check_has_tokenizer(model)
    if trainer and trainer.init == "folder":
        weight_files(model)
    for record in read_records(data):
        if prompts:
            prompt_of(record, prompts)
        if prompts and prompts.answer_key:
            record.text_or_number(prompts.answer_key)
    if reward:
        resolve_reward(reward)
