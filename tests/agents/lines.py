"""A tiny model whose tokens are the lines of a game: whole games are short, and quickly learned."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.agents.test_training import longer_model

NUM_TOKENS = 1600
ENDS = "{'assistant': '<|end|>', 'user': '\\n', 'system': '\\n\\n'}"
TEMPLATE = f"{{% for m in messages %}}{{{{ m['content'] + {ENDS}[m['role']] }}}}{{% endfor %}}"
Conversation = list[dict[str, str]]


def lines_model(folder: Path, games: Iterable[Conversation]) -> Path:
    """Return a model without weights, whose tokenizer makes one token of most lines of the games.

    Other texts are more tokens, down to one a byte.
    """
    model = longer_model(folder, 1024)
    tokenizer = Tokenizer(models.BPE())
    by_lines = pre_tokenizers.Split("\n", "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([by_lines, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS,
        special_tokens=["<|pad|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((said["content"] for game in games for said in game), trainer)
    tokenizer.save(str(model / "tokenizer.json"))
    changed = {
        "config.json": {"vocab_size": tokenizer.get_vocab_size()},
        "tokenizer_config.json": {"chat_template": TEMPLATE},
    }
    for name, values in changed.items():
        held = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(held | values))
    return model
