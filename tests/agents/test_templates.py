"""Chat templates that nobody here wrote: all of TRL's wheel, played through a session."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("uvicorn", reason="the extra 'agents' is not installed")

from jinja2 import UndefinedError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from spmd_rl.gateway.config import GatewayConfig
from spmd_rl.gateway.dialects.request import Refused, SamplingRules
from spmd_rl.gateway.follow_template import TemplateExtras, TemplateMode
from spmd_rl.gateway.plan import SessionParts
from spmd_rl.gateway.replies import choose_format
from spmd_rl.gateway.session import Session
from spmd_rl.gateway.sessions import Sessions
from spmd_rl.hooks.context import HookContext
from spmd_rl.hooks.texts import EpisodeTexts
from tests.unit.data.chat_templates import _rust
from tests.unit.gateway.exact import check_exact
from tests.unit.gateway.fakes import FakeEngine, prompt_of
from tests.unit.gateway.test_session import draw, user

pytestmark = pytest.mark.agents
NUM_TEMPLATES = 72  # of TRL 1.16
SPECIAL = re.compile(
    r"<\|[^<>|\s'{}]{1,40}\|>|<｜[^<>'{}]{1,40}｜>|<(?:start|end)_of_turn>|<turn\|>|<\|turn>"
    r"|<end_of_utterance>|</?s>|<eos>|<bos>"
)
# They take messages whose content is a list of parts, as their processors make it.
WANTS_PARTS = {
    f"{name}{kind}" for name in ("idefics3", "llava_next", "smolvlm") for kind in ("", "_training")
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def folder() -> Path | None:
    """Return the folder of the installed trl's templates, without an import of trl."""
    spec = importlib.util.find_spec("trl")
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) / "chat_templates" if places else None


FOLDER = folder()
FILES = sorted(FOLDER.glob("*.jinja")) if FOLDER else []
SHOWN = [file for file in FILES if file.stem not in WANTS_PARTS]
needs_trl = pytest.mark.skipif(not FILES, reason="trl is not installed")
templates = pytest.mark.parametrize("file", SHOWN, ids=lambda file: file.stem)


class Texts(EpisodeTexts):
    """The texts of a template, whose special tokens are tokens of their own."""

    def __init__(self, template: str) -> None:
        super().__init__(lambda: self.tokenizer)
        rust = Tokenizer.from_str(_rust().to_str())
        rust.add_special_tokens(sorted({*SPECIAL.findall(template), "<|user|>", "</s>"}))
        self.tokenizer: Any = PreTrainedTokenizerFast(
            tokenizer_object=rust, bos_token="<s>", eos_token="</s>", chat_template=template
        )
        self.tokenizer.context = 1 << 16
        self.tokenizer.eos_token = self.end = self._end()
        self.tokenizer.config_eos_ids = (self.tokenizer.eos_token_id,)

    def oracle(self, messages: list[Any], tools: Any = None) -> str:
        """Return what transformers makes of messages."""
        return str(
            self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True
            )
        )

    def _end(self) -> str:
        """Return the token that the template writes after a reply."""
        messages = [user("question"), {"role": "assistant", "content": "answer"}]
        try:
            shown = self.tokenizer.apply_chat_template(messages, tokenize=False)
        except UndefinedError:  # it takes content in parts
            return "</s>"
        found = SPECIAL.findall(shown.rpartition("answer")[2])
        return found[0] if found else "<|user|>"  # GLM ends a turn by the beginning of the next


def opened(
    texts: Texts, said: Any, mode: TemplateMode = "follow", form: str = "hermes"
) -> tuple[Session, FakeEngine]:
    """Return a session with a template, in which the policy says what `said` makes of a prompt."""

    def reply(prompt: str) -> str:
        thought = "hm\n</think>\n\n" if prompt.rstrip().endswith("<think>") else ""
        return thought + said() + texts.end

    engine: Any = FakeEngine(texts, reply)  # type: ignore[arg-type]
    assert texts.chat_template is not None
    replies = choose_format(form, texts.chat_template)
    parts = SessionParts(GatewayConfig(template=mode), texts, replies, "policy")
    ctx = HookContext({}, 1, 3)
    session = Sessions(parts, "http://x").open(ctx, prompt_of(), engine, SamplingRules(1.0))
    return session, engine


@needs_trl
def test_all_templates_are_there() -> None:
    assert len(FILES) == NUM_TEMPLATES
    assert {file.stem for file in FILES} > WANTS_PARTS


async def conversation(session: Session, num_turns: int) -> list[Any]:
    """Ask, and ask again; return all messages."""
    messages: list[Any] = []
    for turn in range(num_turns):
        messages.append(user(f"question {turn}"))
        messages.append((await draw(session, messages)).message)
    return messages


@needs_trl
@templates
def test_the_policy_sees_what_transformers_renders(file: Path) -> None:
    """Each prompt has the text of the template, and begins with the held tokens if it can."""
    texts = Texts(file.read_text())
    numbers = iter(range(9))
    session, engine = opened(texts, lambda: f"answer {next(numbers)}", form="thoughts")
    messages = asyncio.run(conversation(session, 3))
    held = [[*before, *turn] for before, turn in engine.drawn]
    num_siblings = 0
    for turn, prompt in enumerate(engine.prompts):
        text = texts.oracle(messages[: 2 * turn + 1])
        assert texts.decode(prompt) == text
        if turn and texts.decode(held[turn - 1]) == text[: len(texts.decode(held[turn - 1]))]:
            assert prompt[: len(held[turn - 1])] == held[turn - 1]
        elif turn:
            num_siblings += 1
            assert prompt == texts.encode(text)
    assert len(session.samples()) == 1 + num_siblings
    check_exact(session, engine)


@needs_trl
@pytest.mark.parametrize("mode", ["follow", "append"])
@templates
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_is_said_is_learned_once(file: Path, mode: TemplateMode, data: Any) -> None:
    """Agents go on from any past, with tools, calls, results and dropped thoughts."""
    texts = Texts(file.read_text())
    said = st.sampled_from(["a", " b ", "<think>\nc\n</think>\n\nd", f"I add. {CALL}", CALL, ""])
    session, engine = opened(texts, lambda: data.draw(said), mode)
    tools = TOOLS if data.draw(st.booleans()) else []
    asyncio.run(wander(session, data, tools))
    check_exact(session, engine)


async def wander(session: Session, data: Any, tools: list[Any]) -> None:
    pasts: list[list[Any]] = [[]]
    for _ in range(data.draw(st.integers(1, 4))):
        past = data.draw(st.sampled_from(pasts))
        calls = past[-1].get("tool_calls") if past else None
        asked = [*past, user(data.draw(st.sampled_from(["q", "r"])))]
        if calls:
            results = [
                {"role": "tool", "tool_call_id": one["id"], "name": "add", "content": "2"}
                for one in calls
            ]
            asked = [*past, *results]
        sent = [dict(one) for one in asked]
        if data.draw(st.booleans()):
            for one in sent:
                one.pop("reasoning_content", None)
        try:
            drawn = await draw(session, sent, extras=TemplateExtras(tools, {}))
        except Refused:  # what a template refuses, nothing is drawn for
            continue
        pasts.append([*asked, drawn.message])


@needs_trl
@pytest.mark.parametrize("name", sorted(WANTS_PARTS))
def test_what_a_template_cannot_show_is_refused(name: str) -> None:
    """Their templates raise, or leave out a content that is a text."""
    assert FOLDER is not None
    texts = Texts((FOLDER / f"{name}.jinja").read_text())
    session, engine = opened(texts, lambda: "never")
    with pytest.raises(Refused, match="template"):
        asyncio.run(conversation(session, 1))
    assert not engine.drawn


def test_a_hostile_template_begins_a_sample_for_each_turn() -> None:
    """It writes the number of the messages at its head, so that nothing can go on."""
    shown = "{% for m in messages %}{{ '<|start|>' + m.role + '\n' + m.content + '<|end|>' }}"
    template = "{{ messages | length }}" + shown + "{% endfor %}{{ '<|start|>assistant\n' }}"
    texts = Texts(template)
    numbers = iter(range(9))
    session, engine = opened(texts, lambda: f"answer {next(numbers)}")
    asyncio.run(conversation(session, 3))
    assert len(session.samples()) == 3
    check_exact(session, engine)
