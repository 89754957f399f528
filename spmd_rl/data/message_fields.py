"""Fields of a message that have several names, read alike in records, logs and requests.

They say whether the message is learned, and what was thought before it.
"""

from __future__ import annotations

from typing import Any

from spmd_rl.errors import DataError

_LEARNED = ("weight", "loss", "loss_mask", "loss_weight", "trainable", "train", "training", "learn")
_MASKED = ("masked",)
MARKS = {*_LEARNED, *_MASKED}  # that say whether a message is learned
_THOUGHTS = ("reasoning_content", "reasoning")
_THOUGHT_BLOCKS = ("reasoning_details", "thinking_blocks", "content")
_PARTS = ("thinking", "reasoning")  # types of parts of a content that are thoughts
_TEXTS = ("thinking", "text", "summary")  # where a block has its text
_ABOUT = MARKS.union(_THOUGHTS, _THOUGHT_BLOCKS) - {"content"}
_ALIASES = _ABOUT - {"weight", "reasoning_content"}


def says_something(value: Any) -> bool:
    """Whether a field says something: a number or a truth value does, be it 0 or false."""
    return value is not None and value not in ("", [], {})


def plain_fields(where: str, message: dict[Any, Any]) -> dict[Any, Any]:
    """Return a message without nulls, of which `weight` and `reasoning_content` have one name.

    `where` names the message. `weight` is 0 or 1. Thoughts among the parts of the content move.
    Raises: DataError for marks or thoughts that cannot be read, or that contradict each other.
    """
    for name in ("content", "tool_calls"):
        _refuse_marks(f"{where}.{name}", message.get(name))
    said = {k: v for k, v in message.items() if v is not None}
    if isinstance(said.get("content"), str) and _ABOUT.isdisjoint(said):
        return said  # as most messages are
    fields = {k: v for k, v in said.items() if k not in _ALIASES}
    if isinstance(content := fields.get("content"), list):
        fields["content"] = [part for part in content if not _is_thought(part)]
    if (weight := weight_of(where, message)) is not None:
        fields["weight"] = weight
    if thought := _thought(where, message):
        fields["reasoning_content"] = thought
    return fields


def _refuse_marks(where: str, parts: Any) -> None:
    """Raise a DataError for a part of a message, or a call in it, that has a mark of its own."""
    for number, part in enumerate(parts if isinstance(parts, list) else ()):
        marks = (name for name in MARKS if isinstance(part, dict) and part.get(name) is not None)
        if name := next(marks, None):
            problem = "a message is learned as a whole, so mark the message, not a part of it"
            raise DataError(f"{where}[{number}].{name}", problem)


def weight_of(where: str, message: dict[Any, Any]) -> int | None:
    """Return 1 for a message that is to be learned, 0 for one that is not, None if none is said.

    Raises: DataError for another value of a mark, and where two marks differ.
    """
    found: dict[str, int] = {}
    for name in (*_LEARNED, *_MASKED):
        if (value := message.get(name)) is None:
            continue
        if value not in (0, 1):
            raise DataError(f"{where}.{name}", f"expected 0 or 1, got {value!r:.80}")
        found[name] = int(value) ^ (name in _MASKED)
    weight: int | None = _agreed(where, found, "disagree on whether this message is learned")
    return weight


def _agreed(where: str, found: dict[str, Any], problem: str) -> Any:
    """Return the value that fields have in common; None without any. Raises: DataError."""
    if len({*found.values()}) > 1:
        raise DataError(where, f"{' and '.join(map(repr, found))} {problem}")
    return next(iter(found.values()), None)


def _thought(where: str, message: dict[Any, Any]) -> str:
    """Return what was thought before a message, or ""."""
    content = message.get("content")
    parts = [part for part in content if _is_thought(part)] if isinstance(content, list) else []
    fields = message | {"content": parts}
    blocks = (_text(f"{where}.{name}", fields.get(name) or "") for name in _THOUGHT_BLOCKS)
    return _written_thought(where, message) or next(filter(None, blocks), "")


def _written_thought(where: str, message: dict[Any, Any]) -> str:
    found = {name: message[name] for name in _THOUGHTS if message.get(name)}
    for name, value in found.items():
        if not isinstance(value, str):
            raise DataError(f"{where}.{name}", f"expected a text, got {value!r:.80}")
    return _agreed(where, found, "are two different thoughts") or ""


def _is_thought(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in _PARTS


def _text(where: str, block: Any) -> str:
    """Return the text of thoughts: a text, a list of blocks, or a block. One may be encrypted."""
    if isinstance(block, str):
        return block
    if isinstance(block, list):
        return "".join(_text(f"{where}[{number}]", one) for number, one in enumerate(block))
    if not isinstance(block, dict):
        raise DataError(where, f"expected a thought, got {block!r:.80}")
    return next((_text(where, block[name]) for name in _TEXTS if block.get(name)), "")
