"""Replies of the policy as messages: thought, text and tool calls, while they are drawn."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import msgspec

from spmd_rl.data.logs.form import call, message
from spmd_rl.data.render.messages import Message
from spmd_rl.errors import ConfigError
from spmd_rl.gateway.follow_template import opening_of
from spmd_rl.gateway.response_templates import BY_DIGEST, FORMS, Form, digest_of
from spmd_rl.types.samples import MODEL

PieceKind = Literal["content", "reasoning_content", "tool_call"]
_CALLS, _THOUGHT = "tool_calls", "reasoning_content"
_MAX_DEPTH = 64  # of the arguments of a call


class ReplyPiece(NamedTuple):
    """What is new of a reply: a text of its content or thought, or a whole tool call."""

    kind: PieceKind
    text: str = ""
    call: Message = {}  # noqa: RUF012  # never changed


class ReplyFormat:
    """Form in which a model writes its replies, loaded once. None: all of a reply is its content.

    Raises: ValueError for a form that transformers refuses.
    """

    def __init__(self, form: Form | None) -> None:
        fields = form["fields"] if form else {}
        self.reads_calls = _CALLS in fields
        self.call_tags, self.thought_tags = _tags(fields, _CALLS), _tags(fields, _THOUGHT)
        self._whole = self._bare = self._parser = None
        if form is not None:
            from transformers.utils.chat_parsing import ResponseParser
            from transformers.utils.chat_parsing.response_templates import load_response_template

            bare = {name: one for name, one in fields.items() if name != _CALLS}
            self._parser = ResponseParser
            self._whole = load_response_template(form)
            self._bare = load_response_template({**form, "fields": bare})

    def parser(self, prompt_text: str, tools: list[Any]) -> Any:
        """Return a parser of one reply, which reads calls if there are tools; None without a form.

        It begins with what the prompt has written of the reply.
        """
        template = self._whole if tools else self._bare
        if template is None or self._parser is None:
            return None
        starts = [found.start() for found in template.start_anchor_re.finditer(prompt_text)]
        opening = prompt_text[starts[-1] :] if starts else opening_of(prompt_text)
        return self._parser(template, opening, tools=tools)


def choose_format(
    setting: str, chat_template: str | None, settings: str = "agent.gateway"
) -> ReplyFormat:
    """Return the format of a model's replies.

    `setting` names a form or a JSON file with one; "" takes the one of a known chat template, and
    "plain" none. The name of the setting begins with `settings`.
    Raises: ConfigError for a name without a form, and for a file that holds none.
    """
    if setting == "plain":
        return ReplyFormat(None)
    name = setting or BY_DIGEST.get(digest_of(chat_template or ""), "")
    if name in FORMS or not name:
        return ReplyFormat(FORMS.get(name))
    path = Path(setting)
    if not path.is_file():
        names = ", ".join([*FORMS, "plain"])
        raise ConfigError(
            f"{settings}.response_template = {setting!r}: no file, and none of {names}"
        )
    return _format_of(path)


def _format_of(path: Path) -> ReplyFormat:
    """Return the format that a file holds. Raises: ConfigError."""
    try:
        return ReplyFormat(msgspec.json.decode(path.read_bytes(), type=dict[str, Any]))
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} holds no response template: {error}") from error


class ReplyReader:
    """Reads a reply from its text, piece by piece.

    The texts of all pieces, joined by kind, are the texts of `message`. Space around them is left
    out, and texts with something else between them are joined by a line break. A thought comes
    first: a later one is content, and so is what looks like a call and is none. `prompt_text` ends
    with what the template has written of the reply. `call_id` makes the id of a call from its
    number.
    """

    def __init__(
        self,
        replies: ReplyFormat,
        prompt_text: str,
        tools: list[Any],
        call_id: Callable[[int], str],
    ) -> None:
        self._call_id = call_id
        self._texts: dict[PieceKind, _TrimmedText] = {
            "content": _TrimmedText(),
            "reasoning_content": _TrimmedText(),
        }
        self._plain: list[str] = []
        self._calls: list[Message] = []
        self._body = ""
        self._call_tags, self._thought_tags = replies.call_tags, replies.thought_tags
        self._is_late = False  # a thought after something else
        self._is_finished = False  # what is still open has no closing tag
        self._parser = replies.parser(prompt_text, tools)
        if self._parser is not None:
            list(self._pieces(self._parser.initial_events))

    def feed(self, text: str) -> list[ReplyPiece]:
        """Take more text and return the pieces that it completes."""
        if not text:
            return []
        if self._parser is None:
            self._plain.append(text)
            return [ReplyPiece("content", text)]
        return list(self._pieces(self._parser.feed(text)))

    def finish(self) -> list[ReplyPiece]:
        """Return the pieces that were held back until the reply was complete."""
        if self._parser is None:
            return []
        self._is_finished = True
        return list(self._pieces(self._parser.finalize()[1]))

    @property
    def message(self) -> Message:
        """The reply so far, in the form of `data/logs`."""
        if self._parser is None:
            return message(MODEL, "".join(self._plain))
        content, thought = (one.text for one in self._texts.values())
        return message(MODEL, content, reasoning_content=thought, tool_calls=self._calls)

    def _pieces(self, events: list[dict[str, Any]]) -> Iterator[ReplyPiece]:
        for event in events:
            kind, field = event["type"], event["field"]
            if kind == "region_open":
                self._body = ""
                spoke = bool(self._texts["content"].text or self._calls)
                self._is_late = spoke and field == _THOUGHT
                if field in self._texts and not self._is_late:
                    self._texts[field].begin()
            elif kind == "region_chunk":
                self._body += event["text"]
                if field in self._texts and not self._is_late:
                    yield from self._text(field, event["text"])
            elif field == _CALLS:
                yield from self._call(event["value"])
            elif self._is_late:
                self._is_late = False
                yield from self._as_content(self._thought_tags)

    def _text(self, kind: PieceKind, text: str) -> Iterator[ReplyPiece]:
        if new := self._texts[kind].add(text):
            yield ReplyPiece(kind, new)

    def _as_content(self, tags: tuple[str, str]) -> Iterator[ReplyPiece]:
        """Yield what stands between the tags, and the tags that were drawn, as content."""
        opening, closing = tags
        self._texts["content"].begin()
        said = opening + self._body + ("" if self._is_finished else closing)
        yield from self._text("content", said)

    def _call(self, value: Any) -> Iterator[ReplyPiece]:
        read = _read_call(value)
        if read is None:
            yield from self._as_content(self._call_tags)
            return
        made = call(self._call_id(len(self._calls)), *read)
        self._calls.append(made)
        yield ReplyPiece("tool_call", call=made)


def _tags(fields: dict[str, Any], name: str) -> tuple[str, str]:
    """Return the texts around a field, as far as they are no patterns."""
    field = fields.get(name, {})
    return str(field.get("open", "")), str(field.get("close", ""))


class _TrimmedText:
    """Text without the space around it, which is given out as soon as it is certain."""

    def __init__(self) -> None:
        self._given: list[str] = []
        self._held = ""  # space that stands before more text, or at the end
        self._begun = False

    @property
    def text(self) -> str:
        return "".join(self._given)

    def begin(self) -> None:
        """Begin another stretch of the text."""
        self._held, self._begun = "", False

    def add(self, text: str) -> str:
        if not self._begun:
            text = text.lstrip()
            if not text:
                return ""
            self._held, self._begun = "\n" if self._given else "", True
        whole = self._held + text
        ready = whole.rstrip()
        if len(text.rstrip()) == 0:
            self._held = whole
            return ""
        self._held = whole[len(ready) :]
        self._given.append(ready)
        return ready


def _read_call(value: Any) -> tuple[str, dict[str, Any]] | None:
    """Return name and arguments of a call; None of what is no call."""
    try:
        found = json.loads(value, parse_constant=_refuse) if isinstance(value, str) else value
        if isinstance(found, dict) and isinstance(found.get("function"), dict):
            found = found["function"]
        if not isinstance(found, dict):
            return None
        name = found.get("name")
        arguments = found.get("arguments", found.get("parameters"))
        if isinstance(arguments, str):
            arguments = json.loads(arguments, parse_constant=_refuse)
        if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
            return None
        msgspec.json.encode([name, arguments])  # half of a surrogate pair is no text
        if _depth(arguments) > _MAX_DEPTH:
            return None
    except (ValueError, RecursionError):
        return None
    return name.strip(), arguments


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _depth(value: Any) -> int:
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return 1 + max(map(_depth, inner), default=0)
    return 0
