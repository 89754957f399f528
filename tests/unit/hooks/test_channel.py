"""What lies between a rank and a process of hooks: messages, the note, output and calls."""

from __future__ import annotations

import itertools
import os
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.hooks.child.calls import LoadedHooks
from spmd_rl.hooks.context import CallInfo
from spmd_rl.hooks.program import FunctionProgram
from spmd_rl.hooks.rank.reward_tasks import RewardTasks
from spmd_rl.hooks.rank.tasks import GroupTask, SampleTask
from spmd_rl.hooks.rank.worker import SHOWN_BYTES_PER_S, Output
from spmd_rl.hooks.signatures import RewardForm, RewardFunction
from spmd_rl.hooks.wire.channel import NO_CALL, CallNote, MessageReader, encode
from spmd_rl.hooks.wire.messages import TO_PROCESS, TO_RANK, Episode, Ready
from spmd_rl.types.prompts import Prompt
from tests.control_texts import COMMANDS, is_harmless
from tests.unit.hooks.cases import make_prompt, make_sample


@given(st.lists(st.text(max_size=40), max_size=6), st.data())
def test_messages_are_read_however_the_stream_is_cut(texts: list[str], data: st.DataObject) -> None:
    messages = [Ready([], text) for text in texts]
    stream = b"".join(map(encode, messages))
    reader, found = MessageReader(TO_RANK), []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        found += reader.feed(stream[:cut])
        stream = stream[cut:]
    assert found == messages and not reader.is_garbled


@pytest.mark.parametrize("garbage", [b"garbage" * 10, encode({"no": "message"})])
def test_what_is_no_message_is_seen_after_those_before_it(garbage: bytes) -> None:
    reader = MessageReader(TO_RANK)
    assert reader.feed(encode(Ready([], "a")) + garbage) == [Ready([], "a")]
    assert reader.is_garbled


def test_a_note_tells_what_runs() -> None:
    descriptor = CallNote.create()
    rank, process = CallNote(descriptor), CallNote(descriptor)
    os.close(descriptor)
    assert rank.read()[0] == NO_CALL
    process.write(7)
    call_id, since_s = rank.read()
    assert call_id == 7
    process.write(8)
    assert rank.read()[0] == 8 and rank.read()[1] >= since_s
    process.clear()
    assert rank.read()[0] == NO_CALL


def test_output_is_shown_up_to_a_bound_a_second() -> None:
    clock, shown = [0.0], []
    output = Output(shown.append, lambda: clock[0])
    chunk = b"x" * 40_000
    for _ in range(3):
        os.write(output.writing_end, chunk)
        output.read()
    assert sum(map(len, shown)) == SHOWN_BYTES_PER_S
    shown.clear()
    clock[0] += 1
    output.read()
    hidden = 3 * len(chunk) - SHOWN_BYTES_PER_S
    assert shown == [f"\n({hidden:,} more bytes of a hook's output are left out)\n"]
    os.write(output.writing_end, b"the end")
    output.read()
    assert output.tail.endswith("xxxthe end")
    output.close()
    os.close(output.writing_end)


def test_one_that_prints_for_ever_is_read_up_to_a_bound_at_once() -> None:
    output = Output(lambda text: None)
    stopped = threading.Event()

    def flood() -> None:
        while not stopped.is_set():
            os.write(output.writing_end, b"x" * 65_536)

    thread = threading.Thread(target=flood, daemon=True)
    thread.start()
    for _ in range(20):
        output.read()  # for ever, if there were no bound
    stopped.set()
    while thread.is_alive():  # it waits for room in the pipe
        output.read()
    output.close()
    os.close(output.writing_end)


def hooks(*forms: RewardForm) -> LoadedHooks:
    functions = [RewardFunction(f"f{n}", lambda *i: i, form) for n, form in enumerate(forms)]
    return LoadedHooks(functions, None, {"a": 1})


def test_calls_cross_with_each_prompt_and_sample_once() -> None:
    one, other = make_prompt(1), make_prompt(2)
    seen = make_sample("x", 1).replace(columns={"seen": np.ones((1, 2), np.int16)})
    run, group = make_sample("ab", 0), [seen, make_sample("", 2)]
    info = CallInfo(step=2, seed=9)
    plain = RewardForm(False, False, False)
    forms = [plain, RewardForm(True, False, False), RewardForm(True, True, False)]
    queued: Any = SimpleNamespace(add=lambda ids: None)
    tasks = RewardTasks(["f0", "f1", "f2"], queued, queued, itertools.count(5))
    tasks.forms = forms
    tasks.open(0, SampleTask(one, run, info))
    tasks.open(1, GroupTask(other, group, info))
    assert not [*tasks.route()]
    message = tasks.message([5, 6, 7])
    assert len(message.prompts) == 2 and len(message.samples) == 3
    (arrived,) = MessageReader(TO_PROCESS).feed(encode(message))
    calls = list(hooks(*forms).reward_calls(arrived))
    assert [(call.call_id, call.prompt.uid, call.reward.name) for call in calls] == [
        (5, 1, "f0"),
        (6, 1, "f1"),
        (7, 2, "f2"),
    ]
    texts = [[sample.text for sample in call.samples] for call in calls]
    assert texts == [["ab"], ["ab"], ["x", ""]]
    assert calls[0].context is None and calls[2].context is not None
    assert (calls[2].context.step, calls[2].context.seed) == (2, 9)
    assert calls[0].start() == (calls[0].prompt, calls[0].samples[0])
    assert calls[2].start() == (calls[2].context, calls[2].prompt, calls[2].samples)
    assert not calls[0].samples[0].tokens.flags.writeable
    assert not calls[2].samples[0].columns["seen"].flags.writeable


def test_an_episode_crosses() -> None:
    prompt, info = make_prompt(3), CallInfo(version=4)
    message = Episode(9, info, 1, 2, 0.5, Prompt.to_columns([prompt]), {})
    (arrived,) = MessageReader(TO_PROCESS).feed(encode(message))
    call = LoadedHooks([], FunctionProgram(print), {"a": 1}).episode_call(arrived, print)
    assert (call.call_id, call.sample_index, call.temperature) == (9, 1, 0.5)
    assert (call.context.sample_index, call.context.version) == (1, 4)
    assert np.array_equal(call.prompt.tokens, prompt.tokens)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_what_a_hook_prints_does_not_command_the_terminal(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    output = Output()
    os.write(output.writing_end, f"said {command}\r 10%\n".encode(errors="surrogateescape"))
    output.read()
    shown = capsys.readouterr().err
    output.close()
    assert is_harmless(shown)
    assert shown.startswith("said ")
    assert shown.endswith("\n 10%\n")
