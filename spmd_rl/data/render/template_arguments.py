"""Arguments of chat templates: whether a template reads them, and as what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

# texts that are true in a template, though whoever wrote them most likely means something else
_MISREAD = ("True", "False", "None", "true", "false", "null")

# arguments of transformers' `apply_chat_template` that this package gives
GIVEN = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tools",
}


def misread(arguments: dict[str, Any]) -> str:
    """Return a sentence on the first argument that is a truth value written as text, or ""."""
    for name, value in arguments.items():
        if isinstance(value, str) and value in _MISREAD:
            return (
                f"{name} is the text {value!r}, which a template takes for true: write a truth "
                "value without quotation marks, or leave it out"
            )
    return ""


def unread(names: Iterable[str], templates: Any) -> str:
    """Return the first of these arguments that a model's chat templates do not read, or "".

    `templates` is the text of one, or several by name, as transformers has them.
    """
    return next((n for n in names if not any(_reads(text, n) for text in _texts(templates))), "")


def _texts(templates: Any) -> Iterator[str]:
    if isinstance(templates, str):
        yield templates
    elif isinstance(templates, dict):
        yield from templates.values()
    else:  # as older tokenizer_config.json have them
        yield from (named["template"] for named in templates)


def _reads(template: str, name: str) -> bool:
    names = _names(template)
    return names is None or name in names


@cache
def _names(template: str) -> frozenset[str] | None:
    """Return the names that a template reads; None for one that is refused when it is rendered."""
    from jinja2 import Environment, TemplateSyntaxError, meta
    from jinja2.ext import Extension

    class Generation(Extension):
        """The block of transformers around what an assistant says."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = Environment(extensions=[Generation, "jinja2.ext.loopcontrols"])
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(template)))
    except TemplateSyntaxError:
        return None
