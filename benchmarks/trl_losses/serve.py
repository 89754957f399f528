"""TRL's side of the comparison of losses, in TRL's own interpreter: it answers requests.

python -m benchmarks.trl_losses.serve FOLDER
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from benchmarks.peer import Laps
from benchmarks.trl_losses.trl_model import model_dpo, model_policy, model_reward
from benchmarks.trl_losses.trl_pairs import divergence, dpo, overlong, reward
from benchmarks.trl_losses.trl_policy import policy

GIVEN_NUMBERS = (policy, dpo, reward, divergence, overlong)  # in float64 where TRL allows it
THROUGH_A_MODEL = (model_policy, model_dpo, model_reward)  # in float32
ANSWERS = {function.__name__: function for function in (*GIVEN_NUMBERS, *THROUGH_A_MODEL)}


def answer(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the reply to a request."""
    if request["kind"] == "versions":
        return {name: version(name) for name in ("trl", "transformers", "torch")}
    asked = ANSWERS[request["kind"]]
    torch.set_default_dtype(torch.float64 if asked in GIVEN_NUMBERS else torch.float32)
    return asked(request, folder)


def main() -> None:
    folder = Path(sys.argv[1])
    logging.set_verbosity_error()
    requests = Laps()
    while True:
        requests.reply(**answer(requests.request(), folder))


if __name__ == "__main__":
    main()
