"""Check that a model has a row for each id of its tokenizer."""

from __future__ import annotations

import json
import subprocess
import sys

from spmd_rl.data.render.eos import eos_ids
from spmd_rl.errors import ConfigError
from spmd_rl.model.tokenizer import FolderTokenizer, light_tokenizer, load_tokenizer


def check_vocabulary(model: str, vocab_size: int) -> None:
    """Raise ConfigError unless a model of this size has a row for each id of its tokenizer."""
    tokenizer = light_tokenizer(model)
    last, token = last_id(tokenizer) if tokenizer else _last_id_elsewhere(model)
    if last >= vocab_size:
        raise ConfigError(
            f"{model}: the tokenizer has ids up to {last}, which is {token}, but config.json has a "
            f"vocab_size of {vocab_size}: give the model a row for each token, or take the last "
            "tokens out of the tokenizer"
        )


def last_id(tokenizer: FolderTokenizer) -> tuple[int, str]:
    """Return the largest id of a tokenizer, or that with which answers end, and what it is."""
    ids = {number: repr(token) for token, number in tokenizer.get_vocab().items()}
    return max((dict.fromkeys(eos_ids(tokenizer)[:1], "the end of a text") | ids).items())


def _last_id_elsewhere(model: str) -> tuple[int, str]:
    """Return the same of a tokenizer that only transformers can load.

    It is loaded in a process of its own, because it starts threads, and ranks are forked from here.
    Raises: ConfigError for a tokenizer that does not load.
    """
    command = [sys.executable, "-m", "spmd_rl.check.vocabulary", model]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        *_, problem = ["it does not load", *done.stderr.split("\n")[:-1]]
        raise ConfigError(f"the tokenizer of {model} does not load: {problem}")
    last, token = json.loads(done.stdout.split("\n")[-2])
    return last, token


if __name__ == "__main__":
    print(json.dumps(last_id(load_tokenizer(sys.argv[1]))))
