"""Chat templates of model folders, rendered by transformers' functions without its tokenizers.

A template sees the special tokens of its tokenizer by name, such as `bos_token`. Those that it
names must stand in tokenizer_config.json; else transformers' tokenizer is asked, which may have
others. Source: transformers 5.17, `PreTrainedTokenizerBase.apply_chat_template`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_NAMED_TOKEN = re.compile(r"\b(\w+_token)\b")


def chosen_template(templates: Any, tools: Any) -> str | None:
    """Return the template for these tools, of one text or of several by name."""
    if not isinstance(templates, Mapping):
        return templates
    return templates.get("tool_use" if tools is not None and "tool_use" in templates else "default")


def named_tokens(template: str, config: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the special tokens that a template names, as the tokenizer's config writes them.

    Returns None where the config lacks one of them.
    """
    texts = {}
    for name in set(_NAMED_TOKEN.findall(template)):
        value = config.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if not isinstance(text, str):
            return None
        texts[name] = text
    return texts


def render_template(
    template: str, tokens: Mapping[str, str], messages: list[dict[str, Any]], **kwargs: Any
) -> str:
    """Return the text of messages by a template. It raises whatever the template raises."""
    from transformers.utils.chat_template_utils import render_jinja_template

    (text,), _ = render_jinja_template([messages], chat_template=template, **{**tokens, **kwargs})
    return str(text)
