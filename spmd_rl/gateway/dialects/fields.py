"""Fields of a request: each is read, ignored by name, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from spmd_rl.data.logs.form import Json, check
from spmd_rl.data.render.template_arguments import GIVEN, misread
from spmd_rl.errors import DataError
from spmd_rl.gateway.dialects.request import ClientSampling, Refused, ReplyRequest, SamplingRules
from spmd_rl.gateway.follow_template import TemplateExtras
from spmd_rl.types.samples import MODEL

MAX_STOPS, MAX_STOP = 64, 256  # number of stops, and characters of one
MAX_CHOICES, MAX_TOP = 128, 20  # replies of a request, and likeliest tokens at a place
END_OF_IDS = 1 << 31
END_OF_SEEDS = 1 << 63


def read_body(body: bytes) -> Json:
    """Return the object of a body. Raises: Refused."""
    try:
        found = msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:
        raise Refused("", f"the body is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise Refused("", f"the body is not an object but {type(found).__name__}")
    return found


class RequestFields:
    """Fields of a body, each of which is taken once. What is left over is unknown."""

    def __init__(self, body: Json, rules: SamplingRules = SamplingRules()) -> None:  # noqa: B008
        self._left = {name: value for name, value in body.items() if value is not None}
        self._rules = rules
        self._ignored: list[str] = []
        self._inner: dict[str, None] = {}  # names of unknown keys of messages and tools

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return a field of this type. Raises: Refused."""
        value = self._left.pop(name, default)
        if value is default:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            names = " or ".join(_NAMES.get(one, one.__name__) for one in kinds)
            raise Refused(name, f"expected {names}, got {_shown(value)}")
        return value

    def number(self, name: str) -> int | None:
        """Return a whole number of at least 1. Raises: Refused."""
        value: int | None = self.take(name, int)
        if value is not None and not 1 <= value < END_OF_IDS:
            raise Refused(name, f"expected 1 or more, got {value}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a text or a list of texts, none of which is empty. Raises: Refused."""
        value = self.take(name, (str, list), [])
        found = [value] if isinstance(value, str) else value
        if not all(isinstance(one, str) and 0 < len(one) <= MAX_STOP for one in found):
            raise Refused(name, f"expected texts of 1 to {MAX_STOP} characters")
        if len(found) > MAX_STOPS:
            raise Refused(name, f"expected at most {MAX_STOPS} texts, got {len(found)}")
        return tuple(found)

    def stops_and_usage(self) -> dict[str, Any]:
        """Return what chats and completions ask for alike. Raises: Refused."""
        options = self.take("stream_options", dict, {})
        return {
            "stops": self.texts("stop"),
            "stop_ids": tuple(self.ids("stop_token_ids").tolist()),
            "stream_usage": options.get("include_usage") is True,
        }

    def ids(self, name: str) -> NDArray[np.int32]:
        """Return a list of token ids as an array. Shape: [T]. Raises: Refused."""
        return token_ids(name, self.take(name, list, []))

    def choices(self) -> int:
        """Return how many replies are asked for. Raises: Refused, unless the rules are free."""
        if not self._rules.free:
            self.only("n", 1, because="a session draws one reply a call")
        number = self.number("n") or 1
        if number > MAX_CHOICES:
            raise Refused("n", f"expected at most {MAX_CHOICES}, got {number}")
        self.only("best_of", number)
        return number

    def num_top(self) -> int:
        """Return how many of the likeliest tokens to tell. Raises: Refused, unless free."""
        if not self._rules.free:
            self.only("top_logprobs", 0, because="only the log-prob of the drawn token is known")
        number: int = self.take("top_logprobs", int, 0)
        if not 0 <= number <= MAX_TOP:
            raise Refused("top_logprobs", f"expected 0 to {MAX_TOP}, got {number}")
        return number

    def only(self, name: str, *allowed: Any, because: str = "") -> None:
        """Take a field whose value changes nothing. Raises: Refused for another value."""
        value = self._left.pop(name, None)
        if value is not None and not any(value == one for one in allowed):
            known = " or ".join(map(_shown, allowed)) or "no value"
            because = because or self._rules.reason
            raise Refused(name, f"expected {known}, got {_shown(value)}: {because}")

    def neutral(self) -> None:
        """Take what clients of OpenAI, vLLM and SGLang name at a value that changes nothing.

        Raises: Refused for another value.
        """
        for name in [one for one in _NEUTRAL if one in self._left]:
            self.only(name, *_NEUTRAL[name])
        self.ignore(*_HINTS)

    def hides_tools(self) -> bool:
        """Take the choice of tools; return whether the prompt shall have none.

        Raises: Refused for a choice that forces tools.
        """
        given = self.take("tool_choice", (str, dict), "auto")
        choice = given if isinstance(given, dict) else {"type": given}
        if choice.get("type") not in ("auto", "none"):
            problem = f"expected auto or none, got {_shown(given)}: {self._rules.reason}"
            raise Refused("tool_choice", problem)
        if choice.get("disable_parallel_tool_use"):
            self.note("tool_choice.disable_parallel_tool_use")
        if not self.take("parallel_tool_calls", bool, True):
            self.note("parallel_tool_calls")
        return choice["type"] == "none"

    def template_kwargs(self) -> Json:
        """Return the arguments for the chat template. Raises: Refused, as a recipe's are."""
        name = "chat_template_kwargs"
        given = self.take(name, dict, {})
        if taken := sorted(GIVEN & given.keys()):
            raise Refused(name, f"cannot have {taken[0]!r}")
        if problem := misread(given):
            raise Refused(name, problem)
        return {key: value for key, value in given.items() if value is not None}

    def look_into(self, name: str, items: Any, known: Mapping[str, Collection[str]]) -> None:
        """Note the keys of a list's objects that are not known, and those of lists in them.

        `known` has the keys by the place of a list, such as "messages[].content".
        """
        for one in items if isinstance(items, list) else ():
            for key, value in one.items() if isinstance(one, dict) else ():
                place = f"{name}[].{key}"
                if key not in known[name] and value:
                    self._inner[place] = None
                elif place in known:
                    self.look_into(place, value, known)

    def sampling(self) -> ClientSampling:
        """Take the fields of sampling, and return those that the client may choose.

        Raises: Refused for a value that is not the recipe's, unless the rules are free.
        """
        rules = self._rules
        if rules.free:
            return self._own_sampling()
        for name in ("temperature", "top_p", "top_k", "min_p"):
            value = self.take(name, (int, float))
            ours = getattr(rules, name)
            off = _OFF.get(name, ())
            if value is None or (ours is not None and math.isclose(value, ours, rel_tol=1e-6)):
                continue
            if value in off and ours in (*off, None):
                continue
            raise Refused(
                name,
                f"got {value:g}, but log-probs are those of the recipe's sampling.{name}"
                + (f" = {ours:g}" if ours is not None else "")
                + ": leave it out, or set the recipe",
            )
        return ClientSampling()

    def _own_sampling(self) -> ClientSampling:
        numbers = {
            name: self.take(name, (int, float)) for name in ("temperature", "top_p", "min_p")
        }
        top_k, seed = self.take("top_k", int), self.take("seed", int)
        if seed is not None and not 0 <= seed < END_OF_SEEDS:
            raise Refused("seed", f"expected 0 to {END_OF_SEEDS - 1}, got {seed}")
        top_k, priority = 0 if top_k == -1 else top_k, self.take("priority", int, 0)
        return ClientSampling(**numbers, top_k=top_k, seed=seed, priority=priority)

    def request(self, **own: Any) -> ReplyRequest:
        """Return what is asked for, with the fields that all dialects name alike.

        What is ignored or unknown is known by now, so nothing can be taken after it.
        """
        common = {
            "model": self.take("model", str, ""),
            "stream": self.take("stream", bool, False),
            "return_token_ids": self.take("return_token_ids", bool, False),
        }
        ignored = (*self._ignored, *own.pop("ignored", ()))
        return ReplyRequest(**common, **own, ignored=ignored, unknown=self.unknown)

    def ignore(self, *names: str) -> None:
        """Take fields that say nothing about the reply. The answer names them in a header."""
        self._ignored += [name for name in names if self._left.pop(name, None) is not None]

    def note(self, name: str) -> None:
        """Note that something was ignored. The answer names it in a header."""
        self._ignored.append(name)

    @property
    def ignored(self) -> tuple[str, ...]:
        """The names of known fields that were ignored."""
        return tuple(self._ignored)

    @property
    def unknown(self) -> tuple[str, ...]:
        """The names of all that nobody took."""
        return (*self._left, *self._inner)


_OFF = {"top_p": (1,), "top_k": (0, -1), "min_p": (0,)}  # values that leave out no token
# fields of other servers, and the values of them that change nothing
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "typical_p": (1,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "logits_processors": ([],),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (0,),
    "top_logprobs": (0,),
    "echo": (False,),
    "modalities": (["text"],),
    "documents": ([],),
    "chat_template": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "function_call": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"), ()),
}
# fields that say nothing about the reply
_HINTS = (
    "seed", "user", "metadata", "store", "service_tier", "prompt_cache_key", "verbosity",
    "prompt_cache_retention", "safety_identifier", "reasoning_effort", "cache_salt", "priority",
    "request_id", "skip_special_tokens", "spaces_between_special_tokens",
)  # fmt: skip
_NAMES = {str: "a text", int: "a whole number", float: "a number", list: "a list", bool: "a truth "
          "value", dict: "an object"}  # fmt: skip


_IDS = list[Annotated[int, msgspec.Meta(ge=0, lt=END_OF_IDS)]]


def _shown(value: Any) -> str:
    return f"{value!r:.60}"


def token_ids(name: str, found: list[Any]) -> NDArray[np.int32]:
    """Return token ids as an array. Shape: [T]. Raises: Refused."""
    # before the array: one of a text among numbers would be of texts as long as that one
    try:
        return np.array(msgspec.convert(found, _IDS), np.int32)
    except msgspec.ValidationError:
        raise Refused(name, "expected token ids") from None


def read_messages(read: Callable[[Json], Json], body: Json) -> Json:
    """Return `messages` and `tools` of a body in our form, by a reader of `data/logs`.

    Raises: Refused that names the field.
    """
    try:
        row = read(body)
        check(row)
        msgspec.json.encode([row["messages"], row.get("tools")])  # half of a surrogate pair
    except DataError as error:
        field = error.where.strip(".: ")
        raise Refused(field, str(error).removeprefix(error.where).lstrip(": ")) from error
    except (AttributeError, TypeError, KeyError) as error:  # a value of another type
        raise Refused("messages", f"not in the form of this endpoint: {error}") from error
    except (ValueError, RecursionError) as error:
        raise Refused("messages", f"this is no text: {error}") from error
    if row["messages"][-1]["role"] == MODEL:
        raise Refused("messages", "the last message is the assistant's: nothing is left to say")
    return row


def extras_of(row: Json, fields: RequestFields) -> TemplateExtras:
    """Take what the template shows besides messages. Raises: Refused."""
    tools = [] if fields.hides_tools() else list(row.get("tools") or [])
    return TemplateExtras(tools, fields.template_kwargs())
