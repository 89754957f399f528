"""What lies between a rank and a process of hooks: frames, the note, output and calls."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.controller.channel.codec import pack
from spmd_rl.hooks.child.episode_calls import episodes_of
from spmd_rl.hooks.child.loaded import LoadedHooks
from spmd_rl.hooks.child.reward_calls import calls_of
from spmd_rl.hooks.context import CallInfo
from spmd_rl.hooks.rank.call_columns import EpisodeRow, calls_message, episodes_message
from spmd_rl.hooks.rank.output import SHOWN_BYTES_PER_S, Output
from spmd_rl.hooks.signatures import RewardForm, RewardFunction
from spmd_rl.hooks.wire.answer_ring import CAPACITY, SIZE_BYTES, AnswerRing
from spmd_rl.hooks.wire.frames import FrameReader, frame
from spmd_rl.hooks.wire.messages import TO_PROCESS
from spmd_rl.hooks.wire.running_note import Running, RunningNote
from tests.control_texts import COMMANDS, is_harmless
from tests.unit.hooks.cases import make_prompt, make_sample

PACKED = st.lists(st.tuples(st.binary(max_size=40), st.binary(max_size=40)), max_size=6)


@given(PACKED, st.data())
def test_frames_are_read_however_the_stream_is_cut(
    packed: list[tuple[bytes, bytes]], data: st.DataObject
) -> None:
    stream = b"".join(map(frame, packed))
    reader, found = FrameReader(), []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        found += reader.feed(stream[:cut])
        stream = stream[cut:]
    assert found == packed and not reader.is_garbled


def test_what_is_no_frame_is_seen_after_those_before_it() -> None:
    reader = FrameReader()
    assert reader.feed(frame((b"a", b"")) + b"garbage" * 10) == [(b"a", b"")]
    assert reader.is_garbled


def test_a_note_tells_what_runs() -> None:
    descriptor = RunningNote.create()
    rank, process = RunningNote(descriptor), RunningNote(descriptor)
    os.close(descriptor)
    assert rank.read() is None
    process.write(7)
    first = rank.read()
    assert first is not None and (first.call_id, first.beside_threads) == (7, False)
    process.add_thread(1)
    process.write(8)
    assert rank.read() == Running(8, rank.read().since_s, True)  # type: ignore[union-attr]
    assert rank.read().since_s >= first.since_s  # type: ignore[union-attr]
    process.add_thread(-1)
    process.clear()
    assert rank.read() is None


def test_output_is_shown_up_to_a_bound_a_second() -> None:
    clock, shown = [0.0], []
    output = Output(shown.append, lambda: clock[0])
    chunk = b"x" * 40_000
    for _ in range(3):
        os.write(output.writing_end, chunk)
        assert output.read()
    assert sum(map(len, shown)) == SHOWN_BYTES_PER_S
    shown.clear()
    clock[0] += 1
    assert output.read()
    hidden = 3 * len(chunk) - SHOWN_BYTES_PER_S
    assert shown == [f"\n({hidden:,} more bytes of a hook's output are left out)\n"]
    os.write(output.writing_end, b"the end")
    assert output.read()
    assert output.tail.endswith("xxxthe end")
    output.close()
    os.close(output.writing_end)


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=200))
def test_answers_come_out_of_the_ring_in_order(steps: list[tuple[int, bool]]) -> None:
    """The process adds some, and the rank takes those that it was told of, or all."""
    memory = memoryview(bytearray(SIZE_BYTES))
    process, rank = AnswerRing(memory), AnswerRing(memory)
    added: list[int] = []
    taken: list[int] = []
    told = 0
    for number, (count, is_told) in enumerate(steps):
        for _ in range(count):
            if len(added) - len(taken) < CAPACITY:
                added.append(1000 * number + len(added))
                process.add(added[-1], added[-1] / 4, added[-1] / 2)
        told = process.count if is_told else told
        found = rank.take(told)
        assert found.seconds == [call_id / 4 for call_id in found.call_ids]
        assert found.rewards == [call_id / 2 for call_id in found.call_ids]
        taken += found.call_ids
        assert taken == added[:told]
    assert taken + rank.take().call_ids == added
    assert rank.take() == ([], [], [])


def test_one_that_prints_for_ever_is_read_up_to_a_bound_a_second() -> None:
    clock = [0.0]
    output = Output(lambda text: None, lambda: clock[0])
    stopped = threading.Event()

    def flood() -> None:
        while not stopped.is_set():
            os.write(output.writing_end, b"x" * 65_536)

    thread = threading.Thread(target=flood, daemon=True)
    thread.start()
    while output.read():
        pass  # for ever, if there were no bound
    assert not output.read(), "not before the next second"
    stopped.set()
    clock[0] += 1
    assert output.read()
    while thread.is_alive():  # it waits for room in the pipe
        clock[0] += 1
        output.read()
    output.close()
    os.close(output.writing_end)


def hooks(*forms: RewardForm) -> LoadedHooks:
    functions = [RewardFunction(f"f{n}", lambda *i: i, form) for n, form in enumerate(forms)]
    return LoadedHooks(functions, None, {"a": 1})


def test_calls_cross_with_each_prompt_and_sample_once() -> None:
    one, other = make_prompt(1), make_prompt(2)
    run, group = (make_sample("ab", 0),), [make_sample("x", 1), make_sample("", 2)]
    info = CallInfo(step=2, seed=9)
    message = calls_message(
        [
            (5, 0, one, run, info),
            (6, 1, one, run, info),
            (7, 2, other, group, info),
        ]
    )
    assert len(message.prompts) == 2 and len(message.samples) == 3
    plain = RewardForm(False, False, False)
    loaded = hooks(plain, RewardForm(True, False, False), RewardForm(True, True, False))
    calls = list(calls_of(TO_PROCESS.unpack(pack(message)), loaded))
    assert [(call.call_id, call.prompt.uid, call.reward.name) for call in calls] == [
        (5, 1, "f0"),
        (6, 1, "f1"),
        (7, 2, "f2"),
    ]
    assert [[sample.text for sample in call.samples] for call in calls] == [
        ["ab"],
        ["ab"],
        ["x", ""],
    ]
    assert calls[0].context is None and calls[2].context is not None
    assert (calls[2].context.step, calls[2].context.seed) == (2, 9)
    assert calls[0].start() == (calls[0].prompt, calls[0].samples[0])
    assert calls[2].start() == (calls[2].context, calls[2].prompt, calls[2].samples)
    assert not calls[0].samples[0].tokens.flags.writeable


def test_episodes_cross_with_each_prompt_once() -> None:
    prompt, info = make_prompt(3), CallInfo(version=4)
    rows = [EpisodeRow(8, prompt, 0, 2, 0.5, info), EpisodeRow(9, prompt, 1, 2, 0.5, info)]
    message = episodes_message(rows)
    assert len(message.prompts) == 1
    episodes = list(episodes_of(TO_PROCESS.unpack(pack(message)), hooks()))
    assert [(one.call_id, one.sample_index, one.temperature) for one in episodes] == [
        (8, 0, 0.5),
        (9, 1, 0.5),
    ]
    assert [one.context.sample_index for one in episodes] == [0, 1]
    assert np.array_equal(episodes[0].prompt.tokens, prompt.tokens)


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


@pytest.mark.parametrize("nonsense", [-1, 1, CAPACITY + 3, 1 << 62])
@pytest.mark.parametrize("is_told", [False, True])
def test_a_count_outside_of_the_ring_is_not_believed(nonsense: int, is_told: bool) -> None:
    memory = memoryview(bytearray(SIZE_BYTES))
    process, rank = AnswerRing(memory), AnswerRing(memory)
    for call_id in (10, 11):
        process.add(call_id, 0.0, 1.0)
    assert rank.take().call_ids == [10, 11]
    memory.cast("q")[0] = nonsense
    assert rank.num_added == 2
    assert rank.take(nonsense if is_told else None).call_ids == []
    process.add(12, 0.0, 1.0)
    assert rank.take().call_ids == [12]
