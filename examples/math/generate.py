"""Writes the data of this example, and a model folder without weights.

    python -m examples.math.generate

`train.jsonl` holds problems with their answers, and `warmup.jsonl` what a careless teacher writes
about others. `eval_seen.jsonl` has new problems of the same templates, and `eval_new.jsonl` has
templates that appear nowhere else. `model/` has a tokenizer that was trained on the problems, with
a token for each digit and a chat template.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from examples.math.problems import (
    HELD_OUT,
    TRAINING,
    Problem,
    Template,
    careless,
    problem,
    solution,
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 128
NUM_TOKENS = 512


def problems(
    templates: Sequence[Template], count: int, rng: random.Random, known: set[str]
) -> list[Problem]:
    """Return problems with questions that are not in `known`, which they join."""
    found: list[Problem] = []
    while len(found) < count:
        one = problem(templates[len(found) % len(templates)], rng)
        if one.question not in known:
            known.add(one.question)
            found.append(one)
    return found


def lesson(one: Problem, care: float, rng: random.Random) -> dict[str, str]:
    said = solution(one) if rng.random() < care else careless(one, rng)
    return {"prompt": one.question, "answer": said}


def asked(one: Problem) -> dict[str, str]:
    return {"prompt": one.question, "answer": str(one.answer)}


def write_model(folder: Path, texts: Iterable[str], *, size: str) -> None:
    """Write a model folder without weights, whose tokenizer is trained on the texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS,
        special_tokens=["<|pad|>", "<|im_end|>", "<|im_start|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sorted(texts), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|pad|>",
        "eos_token": "<|im_end|>",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", settings)
    write_json(folder / "config.json", model_config(size))
    write_json(folder / "generation_config.json", {"eos_token_id": 1, "pad_token_id": 0})


def model_config(size: str) -> dict[str, Any]:
    """Return the config of a Qwen3 model: "tiny" for a CPU, "0.6B" for a GPU."""
    tiny = size == "tiny"
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": NUM_TOKENS,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0 if tiny else 1000000.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "bos_token_id": None,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "dtype": "float32" if tiny else "bfloat16",
        "hidden_size": 96 if tiny else 1024,
        "intermediate_size": 256 if tiny else 3072,
        "num_hidden_layers": 3 if tiny else 28,
        "num_attention_heads": 4 if tiny else 16,
        "num_key_value_heads": 2 if tiny else 8,
        "head_dim": 24 if tiny else 128,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.08 if tiny else 0.02,
    }


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def write(path: Path, records: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in records), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-train", type=int, default=1200)
    parser.add_argument("--num-lessons", type=int, default=2000)
    parser.add_argument("--num-eval", type=int, default=64, help="problems of each evaluation")
    parser.add_argument(
        "--care", type=float, default=0.7, help="chance that the teacher makes no mistake"
    )
    parser.add_argument("--size", choices=("tiny", "0.6B"), default="tiny", help="of the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()

    rng, known = random.Random(args.seed), set[str]()
    train = problems(TRAINING, args.num_train, rng, known)
    taught = problems(TRAINING, args.num_lessons, rng, known)
    lessons = [lesson(one, args.care, rng) for one in taught]
    args.out.mkdir(parents=True, exist_ok=True)
    write(args.out / "train.jsonl", map(asked, train))
    write(args.out / "warmup.jsonl", lessons)
    for name, templates in (("seen", TRAINING), ("new", HELD_OUT)):
        held_out = problems(templates, args.num_eval, rng, known)
        write(args.out / f"eval_{name}.jsonl", map(asked, held_out))
    texts = [text for row in lessons for text in row.values()]
    write_model(args.out / "model", [*texts, *["user assistant"] * 100], size=args.size)


if __name__ == "__main__":
    main()
