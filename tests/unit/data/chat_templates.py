"""Small chat templates in the manner of well-known ones, and a tokenizer with merges for them."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<|start|>", "<|end|>", "<|eot|>", "<|head|>", "<|/head|>"]
CORPUS = [
    "user assistant system\n\n\n\n the cat and the hat\n\n Ab ab abc  abc\n<think> </think>"
] * 9

CALLS = "{%- for call in m.tool_calls or [] %}{{ '<call>' + (call.function | tojson) }}{% endfor %}"
# A block for transformers' mask of assistant tokens is around what an engine would draw.
CHATML = (
    "{%- if tools %}{{ '<|start|>tools\n' + (tools | tojson) + '<|end|>\n' }}{% endif %}"
    "{%- if language %}{{ '<|start|>' + language + '<|end|>\n' }}{% endif %}"
    "{%- for m in messages %}{{ '<|start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    + CALLS
    + "{{ '<|end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{{ '<s>' }}{% for m in messages %}"
    "{{ '<|head|>' + m.role + '<|/head|>\n\n' + m.content | trim + '<|eot|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
# Thinking is left out of the turns before the last question.
QWEN = (
    "{%- set last = namespace(user=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages %}{{ '<|start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' and loop.index0 > last.user %}"
    "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content }}" + CALLS + "{{ '<|end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start|>assistant\n' }}"
    "{%- if no_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
MISTRAL = (
    "{{ '<s>' }}{% for m in messages %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else ' ' + m.content + '</s>' }}"
    "{%- endfor %}"
)
# It marks no end of a turn, and its turns begin with no special token.
PLAIN = (
    "{%- for m in messages %}{{ m.role + ':\n' + m.content + '\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
)
# A turn ends where the next role begins, as in GLM's: the markers are end-of-text tokens.
MARKERS = ("<|start|>", "<|head|>")
GLM = (
    "{%- set last = namespace(user=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{{ '<s>' }}{% for m in messages %}"
    "{%- if m.role == 'assistant' %}{{ '<|/head|>\n<think>' }}"
    "{{ m.reasoning_content if m.reasoning_content and loop.index0 > last.user }}"
    "{{ '</think>\n' + m.content | trim }}" + CALLS + "{% else %}"
    "{{ ('<|head|>' if m.role == 'tool' else '<|start|>') + m.role + '\n' + m.content }}{% endif %}"
    "{%- endfor %}{% if add_generation_prompt %}{{ '<|/head|>' }}{% endif %}"
)
# The thought of a reply is opened for it; or it is left out of all replies of the past.
OPENED = CHATML.replace("<|start|>assistant\n' }}", "<|start|>assistant\n<think>\n' }}")
FORGETFUL = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
ENDS = {
    "</s>": (MISTRAL, PLAIN, GLM),
    "<|end|>": (CHATML, QWEN, OPENED, FORGETFUL),
    "<|eot|>": (LLAMA,),
}


@cache
def _rust() -> Tokenizer:
    rust = Tokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    rust.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return rust


@cache
def tokenizer_of(template: str) -> Any:
    """Return transformers' tokenizer with this template, as `load_tokenizer` prepares it."""
    end = next(end for end, templates in ENDS.items() if template in templates)
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=_rust(), bos_token="<s>", eos_token=end, chat_template=template
    )
    ends = (end, *MARKERS) if template == GLM else (end,)
    tokenizer.context = 1 << 16
    tokenizer.config_eos_ids = tuple(tokenizer.convert_tokens_to_ids([*ends]))
    return tokenizer
