"""The work that both sides do: the same weights, prompts, group size, tokens, reward, loss and
optimizer.

Each step draws exactly NEW_TOKENS tokens for every sample: no sample ends early, so that both learn
from the same number of tokens. Before the timed steps both take one step on the same given
completions, whose gradient norms must agree: that they compute the same thing is measured, not
assumed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random

PROMPTS = 64
GROUP = 8
NEW_TOKENS = 4
LEARNING_RATE = 1e-4
BETAS = (0.9, 0.999)
EPSILON = 1e-8
CLIP_NORM = 1.0
EXAMPLE = Path(__file__).parents[2] / "examples/arithmetic"
TOKENIZER = EXAMPLE / "model"
NUM_ROWS = 1 << 15  # prompts in the file: more than any run draws
WEIGHTS_SEED = 1


@dataclass(frozen=True)
class Size:
    """A Qwen3 of some shape, known by its parameters in millions."""

    millions: str
    hidden: int
    intermediate: int
    layers: int
    head_dim: int


SIZES = (
    Size("0.14", 64, 168, 3, 16),
    Size("1.0", 128, 384, 5, 32),
    Size("4.0", 256, 768, 5, 64),
)


def write_model(size: Size, folder: Path) -> int:
    """A Hugging Face folder with random weights; returns its number of parameters."""
    from spmd_rl.model.hf import random_weights, save_folder
    from spmd_rl.model.network import CausalLM
    from spmd_rl.model.read import read_spec

    like = folder / "like"
    like.mkdir(parents=True)
    for path in TOKENIZER.glob("*.json"):
        (like / path.name).write_text(path.read_text())
    config = json.loads((TOKENIZER / "config.json").read_text())
    config |= {
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "head_dim": size.head_dim,
        "initializer_range": 0.05,
    }
    (like / "config.json").write_text(json.dumps(config))
    spec = read_spec(like)
    model = CausalLM(spec)
    model.load_state_dict(dict(random_weights(spec, WEIGHTS_SEED)))
    save_folder(folder / "model", like, model.named_parameters())
    return spec.num_parameters


def write_prompts(path: Path) -> None:
    """The example's sums, over and over."""
    lines = (EXAMPLE / "train.jsonl").read_text().splitlines()
    path.write_text("".join(f"{lines[row % len(lines)]}\n" for row in range(NUM_ROWS)))


def given_completions() -> list[list[list[int]]]:
    """For each prompt of the first step its samples, as token ids; none is special."""
    random = Random(1)
    return [
        [[random.randrange(2, 104) for _ in range(NEW_TOKENS)] for _ in range(GROUP)]
        for _ in range(PROMPTS)
    ]


def num_digits(text: str) -> float:
    """The reward: of a spread that hides the constants which both sides add to the standard
    deviation.
    """
    return float(sum(character.isdigit() for character in text))
