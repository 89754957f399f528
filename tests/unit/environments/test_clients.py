"""Agents that call the policy over HTTP: what they are given, what they leave, and their end."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from asyncio.base_subprocess import BaseSubprocessTransport
from asyncio.subprocess import Process
from asyncio.unix_events import ThreadedChildWatcher
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.environments.client_agents import task_of
from spmd_rl.environments.client_program import EPISODE_ENV, CommandAgent, command_words
from spmd_rl.environments.config import AgentConfig
from spmd_rl.environments.function import FunctionAgent
from spmd_rl.environments.make import check_agent
from spmd_rl.errors import ConfigError
from spmd_rl.gateway.config import GatewayConfig
from spmd_rl.hooks.context import HookContext
from spmd_rl.hooks.failures import EpisodeFailure
from spmd_rl.types.samples import Sample
from tests.unit.environments.cases import chat_prompt
from tests.unit.hooks.cases import make_sample

HERE = Path(__file__)
HERMSE = GatewayConfig(response_template="hermse")
PROMPT = chat_prompt("what is {key}?", "42", meta={"level": 3})


class Session:
    """A session that has drawn one sample, or none."""

    root_url, base_url, key = "http://127.0.0.1:9", "http://127.0.0.1:9/v1", "secret"

    def __init__(self, num_samples: int = 1, is_over: bool = False) -> None:
        self.is_over = is_over
        self._samples = [make_sample(index=index) for index in range(num_samples)]

    def samples(self) -> list[Sample]:
        return self._samples

    def close(self) -> None:
        """Nothing is open."""


def played(agent: FunctionAgent | CommandAgent, session: Session | None = None) -> Any:
    """Return the samples and the notes of an episode."""
    ctx = HookContext()
    samples = asyncio.run(agent.play(ctx, PROMPT, session or Session()))
    return samples, ctx.notes


async def tells(base_url: str, key: str, task: dict[str, Any]) -> str:
    return json.dumps([base_url, key, task])


async def grades(base_url: str, key: str, task: dict[str, Any]) -> dict[str, float]:
    return {"reward": 0.5, "level": task["meta"]["level"]}


def waits(base_url: str, key: str, task: dict[str, Any]) -> float:
    return 0.25


async def breaks(base_url: str, key: str, task: dict[str, Any]) -> None:
    raise KeyError("tool")


async def ends_otherwise(base_url: str, key: str, task: dict[str, Any]) -> None:
    raise EpisodeFailure("tool", "it is broken")


async def gives_nonsense(base_url: str, key: str, task: dict[str, Any]) -> float:
    return float("nan")


async def takes_little(task: dict[str, Any]) -> None:
    """It has not the parameters of an agent."""


def function(one: Callable[..., Any]) -> FunctionAgent:
    return FunctionAgent(f"{HERE}:{one.__name__}", 2)


def test_a_function_gets_the_task_without_its_answer() -> None:
    (sample,), notes = played(function(tells))
    assert json.loads(notes["result"]) == [Session.base_url, "secret", task_of(PROMPT)]
    assert "42" not in notes["result"]
    assert sample.reward != sample.reward  # a grader gives it


def test_a_function_may_give_the_reward() -> None:
    samples, _ = played(function(grades), Session(2))
    assert [one.reward for one in samples] == [0.5, 0.5]
    assert samples[0].parts == {"reward": 0.5, "level": 3.0}
    assert played(function(waits))[0][0].reward == 0.25


@pytest.mark.parametrize(
    ("one", "num_samples", "kind", "problem"),
    [
        (breaks, 1, "agent", "raised KeyError: 'tool'"),
        (ends_otherwise, 1, "tool", "it is broken"),
        (gives_nonsense, 1, "agent", "no finite number"),
        (grades, 0, "agent", "without a call of the policy"),
    ],
)
def test_a_function_that_fails_has_a_kind(
    one: Callable[..., Any], num_samples: int, kind: str, problem: str
) -> None:
    with pytest.raises(EpisodeFailure, match=problem) as caught:
        played(function(one), Session(num_samples))
    assert caught.value.kind == kind


async def says_much(base_url: str, key: str, task: dict[str, Any]) -> str:
    return "the end"


@pytest.mark.parametrize(
    ("one", "reward"), [(breaks, 0.0), (says_much, 0.0), (grades, 0.5), (waits, 0.25)]
)
def test_an_agent_that_had_all_its_turns_is_truncated(
    one: Callable[..., Any], reward: float
) -> None:
    samples, _ = played(function(one), Session(2, is_over=True))
    assert [(sample.status, sample.reward) for sample in samples] == [("truncated", reward)] * 2
    with pytest.raises(EpisodeFailure, match="without a call"):
        played(function(one), Session(0, is_over=True))


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("raise SystemExit(3)", 0.0),
        ('open("result.json", "w").write("0.5"); raise SystemExit(3)', 0.5),
    ],
)
def test_a_program_that_had_all_its_turns_is_truncated(text: str, reward: float) -> None:
    (sample,), _ = played(program(text), Session(is_over=True))
    assert (sample.status, sample.reward) == ("truncated", reward)
    with pytest.raises(EpisodeFailure, match="ended with 3"):
        played(program(text), Session())


def program(text: str, *words: str) -> CommandAgent:
    """Return an agent that runs a text of Python."""
    quoted = text.replace("'", "'\"'\"'")
    return CommandAgent(f"{sys.executable} -c '{quoted}' {' '.join(words)}", {"EXTRA": "1"})


def test_a_command_gets_its_places_once_and_nothing_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "hush")
    tell = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]))"
    agent = program(tell, "{base_url} --key={key} '{task}' {task_file} {other}")
    monkeypatch.setattr("spmd_rl.environments.client_program.MAX_NOTE", 100_000)
    monkeypatch.setattr("spmd_rl.hooks.context.MAX_NOTE", 100_000)
    _, notes = played(agent)
    words, variables, folder = json.loads(notes["stdout"])
    assert words == [
        Session.base_url,
        "--key=secret",
        "what is {key}?",
        f"{folder}/task.json",
        "{other}",
    ]
    assert "hush" not in variables.values()
    assert variables["OPENAI_BASE_URL"] == Session.base_url
    assert variables["OPENAI_API_KEY"] == variables["ANTHROPIC_API_KEY"] == "secret"
    assert variables["ANTHROPIC_BASE_URL"] == Session.root_url
    assert variables["HOME"] == folder
    assert variables["EXTRA"] == "1"
    assert not Path(folder).exists()


def test_a_command_names_its_files_from_the_folder_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("python").write_text("no program")
    Path("solve.py").write_text("import sys; print(sys.argv, open(sys.argv[1]).read())")
    Path("lists").mkdir()
    (tmp_path / "lists/prices").write_text("a violin: 74")
    _, notes = played(CommandAgent("python solve.py lists/prices lists solve.sh", {}))
    words = [f"{tmp_path}/solve.py", f"{tmp_path}/lists/prices", "lists", "solve.sh"]
    assert notes["stdout"] == f"{words} a violin: 74\n"
    Path("start").write_text("#!/bin/sh\necho begun")
    Path("start").chmod(0o700)
    _, notes = played(CommandAgent("./start", {}))
    assert notes["stdout"] == "begun\n"


def test_a_command_may_leave_a_reward() -> None:
    (sample,), _ = played(
        program("open('result.json', 'w').write('{\"reward\": 2, \"right\": 1}')")
    )
    assert (sample.reward, sample.parts) == (2.0, {"reward": 2.0, "right": 1.0})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import sys; print('lost', file=sys.stderr); sys.exit(3)", "ended with 3: lost"),
        ("raise ValueError('lost')", "ended with 1: ValueError: lost"),
        ("import os; os.kill(os.getpid(), 9)", "ended with -9: it said nothing"),
        ("open('result.json', 'w').write('{')", "result.json cannot be read"),
        ("import os; os.symlink('/etc/passwd', 'result.json')", "a link"),
        ("open('result.json', 'w').write('\"x\"' + ' ' * (1 << 20))", "larger than 1 MiB"),
        ("open('result.json', 'w').write('[1]')", "no finite number"),
        ("import os; os.mkfifo('result.json')", "is no file"),
        ("import os; os.mkdir('result.json')", "is no file"),
        ("import os; os.symlink('/dev/zero', 'result.json')", "a link"),
        ("import os; os.truncate(os.open('result.json', 65), 1 << 40)", "larger than 1 MiB"),
        ("import socket; socket.socket(socket.AF_UNIX).bind('result.json')", "cannot be read"),
    ],
)
def test_a_command_that_fails_is_the_agents_fault(text: str, problem: str) -> None:
    with pytest.raises(EpisodeFailure, match=problem) as caught:
        played(program(text))
    assert caught.value.kind == "agent"


def test_a_missing_program_has_failed() -> None:
    with pytest.raises(EpisodeFailure, match="cannot be started"):
        played(CommandAgent("/no/such/program", {}))


def test_a_program_that_has_ended_keeps_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal reaps a process that has ended; before asyncio does, its code is 255."""

    def kill(process: asyncio.subprocess.Process) -> None:
        raise AssertionError("a program that has ended was killed")

    monkeypatch.setattr(asyncio.subprocess.Process, "kill", kill)
    _, notes = played(program("print('done')"))
    assert notes["stdout"].strip() == "done"


def test_the_end_of_a_program_is_left_to_its_watcher(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The watcher is held until somebody closes the program, or waits for it.
    may_watch = threading.Event()
    watch = vars(ThreadedChildWatcher)["_do_waitpid"]
    close = BaseSubprocessTransport.close
    wait = Process.wait

    def held(*given: Any) -> None:
        may_watch.wait(60)
        watch(*given)

    def closed(transport: Any) -> None:
        close(transport)
        may_watch.set()

    async def waited(process: Any) -> int:
        may_watch.set()
        return await wait(process)

    monkeypatch.setattr(ThreadedChildWatcher, "_do_waitpid", held)
    monkeypatch.setattr(BaseSubprocessTransport, "close", closed)
    monkeypatch.setattr(Process, "wait", waited)
    played(program("pass"))
    assert not caplog.records


def test_output_without_end_is_read_and_its_end_is_kept() -> None:
    _, notes = played(program("print('x' * 5_000_000 + 'last')"))
    assert notes["stdout"].endswith("last\n")
    assert len(notes["stdout"]) == 1000


def living(mark: str) -> list[int]:
    """Return the processes that have this in their environment."""
    found = []
    for one in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (one / "environ").read_bytes() and int(one.name) != os.getpid():
                found.append(int(one.name))
        except OSError:
            continue
    return found


FORKS = """
import os, subprocess, sys
for number in range(3):
    subprocess.Popen(["sleep", "1000"], start_new_session=number % 2 == 0)
print("on", flush=True)
"""


HIDES = """
import os, sys, time
if os.fork():
    os.wait()
    sys.exit({code})
os.setsid()
if os.fork():
    os._exit(0)
os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(1000)", {sign!r}], {{}})
"""


def has_word(word: str) -> list[int]:
    """Return the processes with this among their words, wherever and whosever they are."""
    found = []
    for one in Path("/proc").glob("[0-9]*"):
        try:
            if word.encode() in (one / "cmdline").read_bytes().split(b"\0"):
                found.append(int(one.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("code", [0, 3])
def test_a_grandchild_that_hides_ends_with_its_episode(code: int) -> None:
    """It has another session and parent, no variable of the episode, and holds the output open."""
    agent = program(HIDES.format(code=code, sign=(sign := f"hides-{os.getpid()}-{code}")))
    with pytest.raises(EpisodeFailure, match="ended with 3") if code else nullcontext():
        played(agent)
    assert has_word(sign) == []


def test_what_is_outside_holds_the_output_open_in_vain(tmp_path: Path) -> None:
    """Nothing ends the holder, and the episode ends without it."""
    sign, go = tmp_path / "sign", tmp_path / "go"
    wait = "import os, pathlib, time\nprint('last', flush=True)\n"
    wait += f"pathlib.Path({str(sign)!r}).write_text(str(os.getpid()))\n"
    wait += f"while not os.path.exists({str(go)!r}): time.sleep(0.01)"
    ctx = HookContext()

    async def main() -> None:
        task = asyncio.create_task(program(wait).play(ctx, PROMPT, Session()))
        while not (sign.exists() and sign.read_text()):
            await asyncio.sleep(0.01)
        with open(f"/proc/{sign.read_text()}/fd/1", "w"):
            go.touch()
            await task

    asyncio.run(main())
    assert ctx.notes["stdout"] == "last\n"


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_nothing_of_a_command_lives_longer_than_its_episode(
    is_cancelled: bool, tmp_path: Path
) -> None:
    sign = tmp_path / "sign"
    wait = (
        f"open({str(sign)!r}, 'w').close()\nimport time; time.sleep(1000)" if is_cancelled else ""
    )
    agent = program(FORKS + wait)
    agent._variables["MARK"] = mark = f"mark-{os.getpid()}-{is_cancelled}"

    async def main() -> None:
        task = asyncio.create_task(agent.play(HookContext(), PROMPT, Session()))
        while is_cancelled and not sign.exists():
            await asyncio.sleep(0.01)
        if is_cancelled:
            assert len(living(mark)) == 4
            task.cancel()
        with pytest.raises(asyncio.CancelledError) if is_cancelled else nullcontext():
            await task

    asyncio.run(main())
    assert living(mark) == []


@pytest.mark.parametrize(
    ("cfg", "problem"),
    [
        (AgentConfig(kind="function", name=f"{HERE}:takes_little"), "expected agent"),
        (AgentConfig(kind="command", name="'"), "No closing quotation"),
        (AgentConfig(kind="command", name="pythn solve.py"), "'pythn' is no program in PATH"),
        (AgentConfig(kind="command", name="./nope {task}"), "nope' is no file that may be run"),
        (AgentConfig(kind="command", name="sh -x nope.py {task}"), "there is no file 'nope.py' in"),
        (AgentConfig(kind="command", name="sh", args={"PATH": "/nowhere"}), "no program in PATH"),
        (AgentConfig(kind="command", name="sh", gateway=HERMSE), "hermse': no file, and none of"),
    ],
)
def test_what_cannot_be_an_agent_is_refused(cfg: AgentConfig, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_agent(cfg)


@pytest.mark.parametrize(
    "name", ["sh -c 'exit 1' {task}", "sh -m solve", "{task_file}", f"sh {HERE} out.py --a.py"]
)
def test_what_may_be_an_agent_is_taken(name: str) -> None:
    check_agent(AgentConfig(kind="command", name=name))


def test_a_function_has_no_arguments() -> None:
    with pytest.raises(ConfigError, match="must be empty"):
        AgentConfig(kind="function", name="a.py:f", args={"a": 1})


def test_words_are_those_of_a_shell() -> None:
    assert command_words("run 'a b' {key}") == ["run", "a b", "{key}"]
    assert EPISODE_ENV.startswith("SPMD_RL")
