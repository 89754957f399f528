"""The pool with processes of its own: every kind of hook, and what each failure leads to."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spmd_rl.errors import ConfigError, SpmdError
from spmd_rl.hooks.config import HookConfig
from spmd_rl.hooks.context import CallInfo
from spmd_rl.hooks.rank.pool import HookPool
from spmd_rl.hooks.rank.tasks import (
    EngineCall,
    EpisodeEnded,
    EpisodeTask,
    Failed,
    Graded,
    GroupTask,
    SampleTask,
)
from spmd_rl.hooks.results import Grade
from spmd_rl.hooks.transcript import Turn
from spmd_rl.types.token_data import TokenData
from tests.unit.hooks.cases import (
    HERE,
    HOOKS,
    character_model,
    events_of,
    make_prompt,
    make_sample,
)

INFO = CallInfo(step=4, version=3, evaluation=True, seed=11)


ENGINE_S = 3.0  # an engine takes longer, and the episode itself far less processor time


def open_pool(*functions: str, config: Any = None, **settings: Any) -> HookPool:
    cfg = HookConfig(**{"deadline_s": 60.0, **settings})
    return HookPool(cfg, [f"{HOOKS}:{name}" for name in functions], config, model=character_model())


def grade_all(pool: HookPool, texts: list[str]) -> list[Any]:
    """The event of each text, in this order."""
    samples = [make_sample(text, number) for number, text in enumerate(texts)]
    ids = [pool.submit(SampleTask(make_prompt(), sample, INFO)) for sample in samples]
    events = events_of(pool)
    return [events[task_id] for task_id in ids]


def rewards(events: list[Any], name: str) -> list[float]:
    return [event.grades[name][0].reward for event in events]


def play(pool: HookPool, texts: list[str], answer: Any = None) -> list[Any]:
    """The last event of an episode for each text."""
    tasks = [EpisodeTask(make_prompt(n, text), 1, 4, 0.5, INFO) for n, text in enumerate(texts)]
    ids = [pool.submit(task) for task in tasks]
    events = events_of(pool, answer or (lambda call: pool.reply(*turn_of(call))))
    return [events[task_id] for task_id in ids]


def turn_of(call: EngineCall) -> tuple[int, int, Turn]:
    """A turn of two tokens, which depend on how many there are."""
    tokens = np.arange(2, dtype=np.int32) + 10 * len(call.past)
    turn = Turn(TokenData(tokens, np.full(2, -0.5, np.float32), np.full(2, 9, np.int32)), "42")
    return call.task_id, call.call_id, turn


def test_samples_are_graded_in_one_process_which_imports_no_more_than_it_needs() -> None:
    with open_pool("process", "modules", "environment") as pool:
        events = grade_all(pool, ["x"] * 300)
        assert pool.num_unfinished == 0
    assert [event.grades["process"][0].parts["calls"] for event in events] == [
        float(number) for number in range(1, 301)
    ]
    assert len({*rewards(events, "process")}) == 1
    assert rewards(events, "process")[0] != os.getpid()
    assert {*rewards(events, "modules")} == {*rewards(events, "environment")} == {0.0}


def test_a_process_does_not_take_itself_for_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with open_pool("environment") as pool:
        assert rewards(grade_all(pool, ["x"]), "environment") == [0.0]


def test_the_context_tells_a_function_of_the_call() -> None:
    with open_pool("told", config={"scale": 0.5}) as pool:
        first, second = grade_all(pool, ["x", "xyz"])
    assert first.grades["told"][0].reward == 0.5
    assert first.metrics == {"length": 1.0} and second.metrics == {"length": 3.0}
    assert first.notes == {} and second.notes == {"first": "x"}
    parts = second.grades["told"][0].parts
    assert (parts["step"], parts["version"], parts["evaluation"]) == (4, 3, 1)
    assert parts["random"] == np.random.default_rng((11, 7, 1)).random()


def test_whole_groups_and_single_samples_go_to_their_own_functions() -> None:
    samples = [make_sample("xxx", 0), make_sample("x", 1), make_sample("xx", 2)]
    with open_pool("ranks", "slow_ranks", "length", "judge") as pool:
        single = pool.submit(SampleTask(make_prompt(), samples[0], INFO))
        group = pool.submit(GroupTask(make_prompt(), samples, INFO))
        events = events_of(pool)
        assert pool.group_functions
    order = [Grade(1.0), Grade(2.0), Grade(0.0)]
    assert events[single].grades == {"length": [Grade(3.0)], "judge": [Grade(3.0)]}
    assert events[group].grades == {"ranks": order, "slow_ranks": order}
    assert events[group].metrics == {"size": 3.0}


def test_a_task_that_no_function_fits_is_graded_with_nothing() -> None:
    with open_pool("ranks") as pool:
        (event,) = grade_all(pool, ["x"])
    assert event == Graded(event.task_id, {}, {}, 0.0)


def test_async_calls_run_at_once_up_to_the_bound() -> None:
    with open_pool("meet", concurrency=8, processes=1) as pool:
        assert rewards(grade_all(pool, ["8"] * 8), "meet") == [1.0] * 8


def test_another_process_is_started_for_long_calls_up_to_the_bound(tmp_path: Path) -> None:
    with open_pool("meets_another", processes=2, deadline_s=0) as pool:
        assert len({*rewards(grade_all(pool, [str(tmp_path)] * 4), "meets_another")}) == 2
    with open_pool("sleepy", processes=1) as pool:
        assert len({*rewards(grade_all(pool, ["0.1"] * 6), "sleepy")}) == 1


@pytest.mark.parametrize("name", ["fails", "async_fails"])
def test_a_failure_costs_its_own_sample_only(name: str) -> None:
    texts = ["good", "exit", "good", "raise", "good", "exit", "fine"]
    with open_pool(name) as pool:
        events = grade_all(pool, texts)
    good = [event for event in events if isinstance(event, Graded)]
    assert rewards(good, name) == [4.0, 4.0, 4.0, 4.0]
    for number, problem in (
        (1, "ended its process with exit code 3"),
        (3, "raised KeyError: 'gold' (at hook_functions.py:"),
        (5, "ended its process with exit code 3"),
    ):
        assert isinstance(events[number], Failed)
        assert problem in events[number].error
        assert (
            f"reward {name} on prompt 7 sample {number} (prompt '37+48=', answer '85', "
            f"response '{texts[number]}'): "
        ) in events[number].error


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("fails", "took longer than 2 s"),
        ("async_fails", "held its event loop for longer than 2 s without an await"),
    ],
)
def test_a_hook_that_hangs_is_ended(name: str, problem: str) -> None:
    with open_pool(name, deadline_s=2.0) as pool:
        (event,) = grade_all(pool, ["hang"])
        assert event.problem == problem
        assert rewards(grade_all(pool, ["good"]), name) == [4.0]


def test_a_failed_task_takes_its_other_calls_with_it() -> None:
    with open_pool("fails", "judge") as pool:
        events = grade_all(pool, ["raise", "good"])
        assert [type(event) for event in events] == [Failed, Graded]
        assert pool.num_unfinished == 0


@pytest.mark.parametrize(
    "array", ["prompt.tokens", "sample.tokens", "sample.logprobs", "sample.versions"]
)
def test_a_function_cannot_change_what_others_see(array: str) -> None:
    with open_pool("writes") as pool:
        (event,) = grade_all(pool, [array])
    assert "raised ValueError: assignment destination is read-only" in event.error


SWITCHES_TORCH = """
import torch

def switches_torch(prompt, sample):
    is_right = torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    if sample.text == "raise":
        raise ValueError(is_right)
    return is_right
"""


def test_torch_is_as_it_was_after_each_call(tmp_path: Path) -> None:
    file = tmp_path / "judge.py"
    file.write_text(SWITCHES_TORCH)
    with HookPool(HookConfig(), [f"{file}:switches_torch"]) as pool:
        events = grade_all(pool, ["x", "raise", "x"])
    assert "raised ValueError: True" in events[1].error
    assert rewards([events[0], events[2]], "switches_torch") == [1.0, 1.0]


def test_what_a_hook_prints_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with open_pool("say") as pool:
        grade_all(pool, ["x"])
    assert "said by a hook\nand on stderr\n" in capfd.readouterr().err


def test_more_than_a_socket_takes_at_once_arrives() -> None:
    with HookPool(HookConfig(deadline_s=0), ["spmd_rl.rewards.answers.match:exact"]) as pool:
        events = grade_all(pool, ["8" * 2_000_000, "85"])
    assert rewards(events, "exact") == [0.0, 1.0]


def test_a_cancelled_task_is_never_heard_of_again() -> None:
    with open_pool("fails", "async_fails", deadline_s=0) as pool:
        hanging = pool.submit(SampleTask(make_prompt(), make_sample("exit"), INFO))
        pool.cancel(hanging)
        assert pool.num_unfinished == 0
        assert rewards(grade_all(pool, ["good"]), "fails") == [4.0]


def test_a_cancelled_async_call_makes_room() -> None:
    with open_pool("meet", concurrency=2, processes=1) as pool:
        stuck = [
            pool.submit(SampleTask(make_prompt(), make_sample("9", number), INFO))
            for number in range(2)
        ]
        waiting = pool.submit(SampleTask(make_prompt(), make_sample("1"), INFO))
        events_of(pool, until=lambda: pool.group_functions == frozenset() and _is_ready(pool))
        for task in stuck:
            pool.cancel(task)
        assert isinstance(events_of(pool)[waiting], Graded)


def _is_ready(pool: HookPool) -> bool:
    return pool._rewards.forms is not None


def test_a_hook_that_cannot_be_imported_is_told(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("1 / 0")
    with HookPool(HookConfig(), [f"{file}:f"]) as pool:
        pool.submit(SampleTask(make_prompt(), make_sample(), INFO))
        with pytest.raises(ConfigError, match="importing it raised ZeroDivisionError"):
            events_of(pool)


def test_a_process_that_dies_while_it_imports_is_told_with_its_output(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import os\nprint('no licence', flush=True)\nos._exit(9)")
    with HookPool(HookConfig(), [f"{file}:f"]) as pool:
        pool.submit(SampleTask(make_prompt(), make_sample(), INFO))
        with pytest.raises(SpmdError, match=r"(?s)exit code 9 while it imported.*no licence"):
            events_of(pool)


def test_an_episode_of_two_turns() -> None:
    calls = []
    with open_pool(generate=f"{HOOKS}:play") as pool:

        def answer(call: EngineCall) -> None:
            calls.append(call)
            pool.reply(*turn_of(call))

        (event,) = play(pool, ["two_turns"], answer)
    assert isinstance(event, EpisodeEnded)
    (sample,) = event.samples
    assert sample.tokens.tolist() == [0, 1, ord("="), ord("4"), ord("2"), 50, 51]
    assert sample.logprobs.tolist() == [-0.5, -0.5, 0, 0, 0, -0.5, -0.5]
    assert sample.versions.tolist() == [9, 9, -1, -1, -1, 9, 9]
    assert sample.mask.tolist() == [True, True, False, False, False, True, True]
    assert (sample.index, sample.execution, sample.temperature) == (1, -1, 0.5)
    assert (sample.status, sample.metadata) == ("completed", {"metrics": {"turns": 2.0}})
    assert [(call.transcript, call.limits.max_tokens, call.limits.stop) for call in calls] == [
        (0, 5, ("</call>",)),
        (0, None, None),
    ]
    assert calls[1].past.tokens.tolist() == sample.tokens[:5].tolist()
    assert calls[1].past.versions.tolist() == sample.versions[:5].tolist()


def test_transcripts_of_one_episode_have_draws_of_their_own() -> None:
    with open_pool(generate=f"{HOOKS}:play") as pool:
        (event,) = play(pool, ["two_agents"])
    assert [(one.index, one.execution, one.status) for one in event.samples] == [
        (1, 1, "completed"),
        (5, 1, "truncated"),
    ]


def test_an_episode_hears_why_the_engine_refuses() -> None:
    def answer(call: EngineCall) -> None:
        if len(call.past):
            pool.refuse(call.task_id, call.call_id, "the context is full")
        else:
            pool.reply(*turn_of(call))

    with open_pool(generate=f"{HOOKS}:play") as pool:
        (event,) = play(pool, ["is_refused"], answer)
    assert event.samples[0].metadata == {"metrics": {"the context is full": 1.0}}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("returns_text", "returned no Sample and no list of them: 'no sample'"),
        ("returns_nothing", "returned no sample"),
        ("returns_early", "the engine has drawn nothing in this transcript yet"),
        ("returns_twice", "returned two samples of one transcript"),
        ("returns_lock", "cannot cross between processes"),
        ("busy_transcript", "another call for this transcript is still running"),
    ],
)
def test_an_episode_that_goes_wrong_is_told(text: str, problem: str) -> None:
    with open_pool(generate=f"{HOOKS}:play") as pool:
        bad, good = play(pool, [text, "two_turns"])
    assert problem in bad.error
    assert f"generate play on prompt 0 sample 1 (prompt '{text}', answer '85'): " in bad.error
    assert isinstance(good, EpisodeEnded)


def test_turns_are_drawn_once_though_the_process_of_an_episode_ends() -> None:
    """The other episode breaks the process while the turn of this one is drawn, and after it."""
    drawn: list[tuple[int, int]] = []
    held: list[EngineCall] = []

    def answer(call: EngineCall) -> None:
        key = call.task_id, len(call.past)
        assert key not in drawn, "the engine was asked twice"
        drawn.append(key)
        if call.task_id == breaker and not held:
            held.append(call)  # it breaks the process once the other waits for its second turn
        else:
            pool.reply(*turn_of(call))
        if held and len(drawn) >= 3:
            pool.reply(*turn_of(held[0]))

    with open_pool(generate=f"{HOOKS}:play", processes=1) as pool:
        info = CallInfo()
        other = pool.submit(EpisodeTask(make_prompt(0, "two_turns"), 0, 1, 1.0, info))
        breaker = pool.submit(EpisodeTask(make_prompt(1, "breaks_once"), 0, 1, 1.0, info))
        events = events_of(pool, answer)
    assert "ended its process with exit code 4" in events[breaker].error
    assert len(events[other].samples[0].tokens) == 7
    assert sorted(drawn) == [(other, 0), (other, 5), (breaker, 0)]


def test_a_deadline_does_not_count_what_the_engine_takes() -> None:
    """The engine answers once all of the deadline has passed since it was asked."""
    calls: list[EngineCall] = []
    with open_pool(generate=f"{HOOKS}:play", episode_deadline_s=ENGINE_S) as pool:
        pool.submit(EpisodeTask(make_prompt(0, "waits"), 0, 1, 1.0, INFO))
        events_of(pool, calls.append, until=lambda: bool(calls))
        asked_s = time.monotonic()
        late = lambda: time.monotonic() - asked_s > ENGINE_S + 0.5  # noqa: E731
        assert events_of(pool, calls.append, until=late) == {}
        pool.reply(*turn_of(calls[0]))
        (event,) = events_of(pool).values()
    assert isinstance(event, EpisodeEnded)


RANK = """
import os, signal, sys
from spmd_rl.hooks.config import HookConfig
from spmd_rl.hooks.context import CallInfo
from spmd_rl.hooks.rank.pool import HookPool
from spmd_rl.hooks.rank.tasks import SampleTask
from spmd_rl.hooks.wire.channel import NO_CALL
from tests.unit.hooks.cases import HOOKS, make_prompt, make_sample
pool = HookPool(HookConfig(deadline_s=0), [f"{HOOKS}:fails"])
pool.submit(SampleTask(make_prompt(), make_sample("hang"), CallInfo()))
(worker,) = pool._plain.workers
while worker.running()[0] == NO_CALL:
    pool.poll()
print(worker.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no parent-death signal")
def test_a_hook_that_hangs_ends_with_its_rank() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RANK],
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    with suppress(ProcessLookupError):  # it has ended already
        assert has_ended(os.pidfd_open(int(done.stdout))), "the process of the hook still runs"


def test_a_forked_process_ends_with_the_process_of_its_hook() -> None:
    with open_pool("forks") as pool:
        (event,) = grade_all(pool, ["x"])
        forked = int(event.grades["forks"][0].reward)
        descriptor = os.pidfd_open(forked)
    assert has_ended(descriptor), "the forked process still runs"


def has_ended(descriptor: int) -> bool:
    """Wait until a process has ended; a minute is the last resort."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    ended = bool(poll.poll(60_000))
    os.close(descriptor)
    return ended


def test_closing_ends_every_process() -> None:
    pool = open_pool("fails", "async_fails", generate=f"{HOOKS}:play", deadline_s=0)
    grade_all(pool, ["good"])
    pids = [worker.pid for group in pool._groups() for worker in group.workers]
    assert len(pids) == 3
    pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
