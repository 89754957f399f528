"""Prompts and samples for tests of hooks, and a loop around a pool."""

from __future__ import annotations

import atexit
import json
import select
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from spmd_rl.hooks.rank.pool import HookPool
from spmd_rl.hooks.rank.tasks import EngineCall, Event, TurnCancelled
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

HERE = Path(__file__).parent
ARITHMETIC = HERE.parents[2] / "examples" / "arithmetic" / "model"
HOOKS = str(HERE / "hook_functions.py")


TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@cache
def character_model() -> str:
    """A folder without weights: a character a token, and turns that end with a line break."""
    folder = Path(mkdtemp(prefix="characters-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    vocabulary = {chr(number): number for number in range(128)}
    rust = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    rust.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")
    rust.decoder = decoders.Fuse()
    rust.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text((ARITHMETIC / "config.json").read_text())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


def make_prompt(uid: int = 7, text: str = "37+48=") -> Prompt:
    return Prompt(uid, np.array([1, 2], np.int32), text=text, answer="85")


def make_sample(text: str = "84", index: int = 3, uid: int = 7) -> Sample:
    num = len(text)
    zeros = np.zeros(num, np.int32)
    return Sample(uid, index, zeros, np.zeros(num, np.float32), zeros, "completed", text=text)


def events_of(
    pool: HookPool,
    answer: Callable[[Any], None] | None = None,
    until: Callable[[], bool] | None = None,
) -> dict[int, Event]:
    """Poll until nothing is unfinished, or until `until`; return the last event of each task."""
    last: dict[int, Event] = {}
    while pool.num_unfinished and not (until and until()):
        for event in pool.poll():
            if isinstance(event, EngineCall | TurnCancelled):
                assert answer is not None, "an engine call that nobody expects"
                answer(event)
            else:
                assert event.task_id not in last, "two events of one task"
                last[event.task_id] = event
        if pool.num_unfinished:
            select.select(pool.filenos(), [], [], 0.2)
    return last
