"""Input that can be refused in the launching process, before a worker starts or torch is imported."""

from __future__ import annotations

from spmd_rl.data.files import read_records
from spmd_rl.errors import ConfigError
from spmd_rl.model.spec import ModelSpec
from spmd_rl.model.tokenizer import check_has_tokenizer
from spmd_rl.rewards.load import resolve_reward


def check_inputs(*, model: str, data: str, reward: str = "") -> None:
    """Read the model's config, every record of the data and the reward function's signature; look for a tokenizer.

    Raises: ConfigError or DataError with the one thing to mend.
    """
    for flag, value in (("--model", model), ("--data", data)):
        if not value:
            raise ConfigError(f"{flag} is missing: name a {'Hugging Face folder' if flag == '--model' else 'file'}")
    ModelSpec.from_folder(model)
    check_has_tokenizer(model)
    read_records(data)
    if reward:
        resolve_reward(reward)
