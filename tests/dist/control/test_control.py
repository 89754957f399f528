"""Real ranks under torchrun: calls work, and every failure ends a run soon, in one sentence."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from spmd_rl.mesh.world import COLLECTIVE_TIMEOUT
from tests.dist.forked_controller import forking
from tests.dist.launched import Launched

pytestmark = pytest.mark.dist

Process = subprocess.Popen[str] | Launched
Start = Callable[[list[str]], subprocess.Popen[str]]
Launch = Callable[..., Launched]
LAST_RESORT_S = 600.0
NEVER = "--run.lost_after_s=100000"  # no rank is lost because it is silent


def outcome(process: Process) -> tuple[int, str, str]:
    """Return exit code, stdout, and the last line of stderr, which is the run's sentence."""
    out, err = process.communicate(timeout=LAST_RESORT_S)
    lines = err.strip().splitlines()
    assert lines.count(lines[-1]) == 1 if lines else True, "the sentence is said once"
    return process.returncode, out, lines[-1] if lines else ""


def report(process: Process) -> dict:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def test_calls_under_spmd_rl_run(chaos: Launch) -> None:
    code, out, last = outcome(chaos("fine"))
    assert code == 0, last
    assert "all fine" in out


def test_calls_under_plain_torchrun(
    start: Start, torchrun: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    """A batch script knows by the file that the run is over."""
    environment["SPMD_RL_DONE_FILE"] = str(tmp_path / "done")
    code, out, last = outcome(start([*torchrun, "--scenario=fine"]))
    assert code == 0, last
    assert "all fine" in out
    assert (tmp_path / "done").exists()
    assert not list(tmp_path.glob("spmd_rl-*"))


def test_own_role_example(launch: Launch, repo: Path) -> None:
    recipe = str(repo / "examples/own_role/word_count.py")
    code, out, last = outcome(launch("run", recipe, "--nproc=2", "--text", "a b. c. d e f"))
    assert code == 0, last
    assert "[2, 1, 3] on 2 ranks" in out


def linked(launch: Launch, repo: Path, *words: str) -> Launched:
    recipe = str(repo / "tests/dist/control/linked.py")
    return launch("run", recipe, "--nproc=2", NEVER, *words, main=forking)


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        (
            [],
            "copy+buckets 192 verified 2 shared 0 of 2 slept ['rollout', 'sleep', 'train', 'wake']",
        ),
        (
            ["--split.train.ranks=1", "--split.infer.ranks=1"],
            "buckets 96 verified 1 shared 0 of 1 stayed ['rollout', 'train']",
        ),
        (
            ["--split.train.ranks=1", "--split.infer.ranks=all"],
            "buckets 96 verified 1 shared 1 of 2 slept",
        ),
        (["--run.verify_every=0"], "copy+buckets 192 verified 0 shared 0 of 0 slept"),
    ],
)
def test_weights_cross_a_link(launch: Launch, repo: Path, split: list[str], expected: str) -> None:
    code, out, last = outcome(linked(launch, repo, *split))
    assert code == 0, last
    assert expected in out


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (
            "flip",
            "push of version 0: tensor 'w' (from [0, 0], extent [6, 4]) of infer on rank 0 does "
            "not hold the bits of train on rank 0, 1 (route: copy+buckets), so infer generates",
        ),
        (
            "replicas",
            "push of version 0: ranks 0 and 1 of train hold different bits of tensor 'w'",
        ),
        ("blind", "self-check of pushes from train to infer: a wrong bit in tensor 'w' was not"),
    ],
)
def test_wrong_weights_are_not_served(
    launch: Launch, repo: Path, fault: str, sentence: str
) -> None:
    code, _, last = outcome(linked(launch, repo, f"--fault={fault}"))
    assert code == 1
    assert sentence in last


def test_without_the_self_check_a_blind_comparison_goes_unnoticed(
    launch: Launch, repo: Path
) -> None:
    settings = "--fault=blind", "--run.self_check=false", "--run.verify_every=9"
    code, out, last = outcome(linked(launch, repo, *settings))
    assert code == 0, last
    assert "verified 0 shared 0 of 0" in out  # the last push was not compared


@pytest.mark.parametrize(
    ("scenario", "code", "sentence"),
    [
        ("raise", 1, "rank 1 (actor.boom): KeyError: 'no such thing'"),
        ("data", 2, "train.jsonl:7: not JSON"),
        ("differ", 1, "actor.differ: the result of ranks [1] differs from rank 0's"),
        ("recipe", 1, "ZeroDivisionError: in the recipe"),
        ("exit", 1, "SystemExit"),
    ],
)
def test_errors_end_with_their_sentence(
    chaos: Launch, tmp_path: Path, scenario: str, code: int, sentence: str
) -> None:
    got, _, last = outcome(chaos(scenario))
    assert got == code, last
    assert sentence in last
    assert not list(tmp_path.glob("spmd_rl-*")), "the run's private folder must not outlive it"


def test_a_recipe_that_computes_for_ever_has_a_deadline(chaos: Launch) -> None:
    code, _, last = outcome(chaos("ever", "--run.between_calls_s=1"))
    assert code == 1
    assert "the recipe has made no call for 1 s: the controller is at chaos.py:" in last


def test_a_worker_error_shows_its_traceback_above_the_sentence(chaos: Launch) -> None:
    _, err = chaos("raise").communicate(timeout=LAST_RESORT_S)
    assert 'raise KeyError("no such thing")' in err
    assert "ChildFailedError" not in err


def test_deadline_saves_all_stacks(chaos: Launch, tmp_path: Path) -> None:
    code, _, last = outcome(chaos("deadline"))
    assert code == 1
    assert "no answer from rank 0" in last
    assert "chaos.py:" in last
    waited = re.search(r" in hang, in actor\.hang after (\d+\.\d) s", last)
    assert waited is not None and float(waited[1]) >= 3, last
    records = [
        json.loads((tmp_path / f"runs/chaos/stacks/rank_{i}.collectives.json").read_text())
        for i in range(2)
    ]
    entered = [len(record["gloo"].get("entries", [])) for record in records]
    assert entered[0] == entered[1] + 1, "rank 0 is in a collective that rank 1 never entered"
    (last,) = records[0]["gloo"]["entries"][-1:]
    assert last["timeout_ms"] == COLLECTIVE_TIMEOUT.total_seconds() * 1000, (
        "the call has a deadline, not its parts"
    )
    stacks = [(tmp_path / f"runs/chaos/stacks/rank_{rank}.txt").read_text() for rank in range(2)]
    assert "barrier" in stacks[0]
    assert "threading.Event().wait()" in stacks[1]


def test_a_stopped_rank_leaves_the_stacks_of_the_others(chaos: Launch, tmp_path: Path) -> None:
    """They are saved too when the call's deadline passes while they are being gathered."""
    process = chaos("hang", "--run.lost_after_s=12", "--run.deadline_s=3")
    os.kill(report(process)["ranks"][1], signal.SIGSTOP)
    code, _, last = outcome(process)
    assert code == 1
    assert "rank 1 (host " in last
    assert "in actor.hang (phase rollout) after " in last
    stacks = tmp_path / "runs/chaos/stacks"
    assert "barrier" in (stacks / "rank_0.txt").read_text()
    assert json.loads((stacks / "rank_0.collectives.json").read_text())["gloo"]["entries"]
    assert "no answer" in (stacks / "rank_1.txt").read_text()


@pytest.mark.parametrize(
    ("victim", "sentence"),
    [
        (1, "lost rank 1 (host "),
        (0, "lost rank 0 (host "),
        ("controller", "was killed by SIGKILL"),
    ],
)
def test_any_death_ends_all(chaos: Launch, victim: int | str, sentence: str) -> None:
    process = chaos("hang", NEVER)
    pids = report(process)
    everyone = [pids["controller"], *pids["ranks"]]
    os.kill(
        pids["ranks"][victim] if isinstance(victim, int) else pids["controller"], signal.SIGKILL
    )
    code, _, last = outcome(process)
    assert code != 0
    assert sentence in last
    if isinstance(victim, int):
        assert "in actor.hang (phase rollout)" in last
    assert all(map(gone, everyone))


# ranks that are stopped, or else the controller, and the last line
STOPPED = {
    "rank 0": ([0], r"lost rank 0 \(host .*"),
    "rank 1": ([1], r"lost rank 1 \(host .*"),
    "both": ([0, 1], r"lost (rank [01] \(host \S+, pid \d+\)(, )?){1,2}, last heard .*"),
    "controller": ([], r".*lost the controller: silent for 10 s.*"),
}


def test_whoever_is_stopped_is_lost_and_ended(chaos: Launch, tmp_path: Path) -> None:
    """All runs wait for the same ten seconds."""
    runs = {}
    for name, (ranks, _) in STOPPED.items():
        process = chaos("hang", "--run.lost_after_s=10", beside=name)
        pids = report(process)
        for pid in [pids["ranks"][rank] for rank in ranks] or [pids["controller"]]:
            os.kill(pid, signal.SIGSTOP)
        runs[name] = process, [pids["controller"], *pids["ranks"]]
    for name, (process, everyone) in runs.items():
        code, _, last = outcome(process)
        assert code == 1
        assert re.fullmatch(STOPPED[name][1], last), last
        assert all(map(gone, everyone))
    for victim in (0, 1):
        stacks = tmp_path / f"rank {victim}/runs/chaos/stacks"
        assert "no answer" in (stacks / f"rank_{victim}.txt").read_text()
        assert "in hang" in (stacks / f"rank_{1 - victim}.txt").read_text()


def test_a_deadline_ends_a_stopped_worker(chaos: Launch) -> None:
    process = chaos("hang", "--run.deadline_s=2", NEVER)
    pids = report(process)
    os.kill(pids["ranks"][1], signal.SIGSTOP)
    code, _, last = outcome(process)
    assert code == 1
    assert "rank 1 (host " in last
    assert "which does not answer" in last
    assert all(map(gone, [pids["controller"], *pids["ranks"]]))


def test_the_launchers_death_ends_all(chaos: Launch, tmp_path: Path) -> None:
    process = chaos("hang", NEVER)
    pids = report(process)
    everyone = [os.pidfd_open(pid) for pid in [pids["controller"], *pids["ranks"]]]
    process.kill()
    for witness in everyone:
        assert select.select([witness], [], [], LAST_RESORT_S)[0]
        os.close(witness)
    err = process.communicate(timeout=LAST_RESORT_S)[1]  # each rank may say it: none reads for all
    assert f"lost its launcher (pid {process.pid})" in err.strip().splitlines()[-1]
    assert not list(tmp_path.glob("spmd_rl-run-*/secret"))


def test_what_a_killed_run_leaves_is_removed_by_the_next(chaos: Launch, tmp_path: Path) -> None:
    process = chaos("hang")
    pids = report(process)
    everyone = {
        pid: os.pidfd_open(pid) for pid in [process.pid, pids["controller"], *pids["ranks"]]
    }
    for pid in everyone:
        os.kill(pid, signal.SIGKILL)
    for witness in everyone.values():
        assert select.select([witness], [], [], LAST_RESORT_S)[0]
        os.close(witness)
    assert list(tmp_path.glob("spmd_rl-run-*/secret"))
    code, _, last = outcome(chaos("fine", "--run.name=next"))
    assert code == 0, last
    assert not list(tmp_path.glob("spmd_rl-*"))


def test_ending_the_controller_ends_the_run_in_order(chaos: Launch) -> None:
    process = chaos("hang")
    pids = report(process)
    os.kill(pids["controller"], signal.SIGTERM)
    code, _, last = outcome(process)
    assert code == 128 + signal.SIGTERM
    assert last == "the run was ended from outside: the controller got SIGTERM"
    assert all(map(gone, [pids["controller"], *pids["ranks"]]))


def test_a_batch_script_knows_ranks_that_left_from_a_run_that_is_over(
    start: Start, torchrun: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    """torchrun ends with exit code 0 either way, so that the controller says why on stderr."""
    environment["SPMD_RL_DONE_FILE"] = str(tmp_path / "done")
    one_rank = [word.replace("--nproc-per-node=2", "--nproc-per-node=1") for word in torchrun]
    code, _, last = outcome(start([*one_rank, "--scenario=leave"]))
    assert code == 0
    assert not (tmp_path / "done").exists()
    assert re.match(r"lost rank 0 \(host \S+, pid \d+\), last heard .* in actor.leave", last), last


@pytest.mark.parametrize(("rank", "number"), [(1, signal.SIGTERM), (0, signal.SIGINT)])
def test_a_signal_to_one_rank_names_that_rank_and_the_signal(
    chaos: Launch, rank: int, number: signal.Signals
) -> None:
    process = chaos("hang")
    pids = report(process)
    os.kill(pids["ranks"][rank], number)
    code, _, last = outcome(process)
    assert code == 128 + number, last
    who = rf"rank {rank} \(host \S+, pid {pids['ranks'][rank]}\)"
    assert re.fullmatch(rf"the run was ended from outside: {who} got {number.name}", last)
    assert all(map(gone, [pids["controller"], *pids["ranks"]]))


def hanging(chaos: Launch, folder: Path) -> tuple[Launched, dict]:
    """Return a run whose last rank is in `Actor.hang`, and its pids."""
    os.mkfifo(folder / "hangs")
    process = chaos("hang")
    pids = report(process)
    (folder / "hangs").read_text()  # ends once that rank was there
    return process, pids


def test_sigquit_shows_the_stacks_and_the_run_goes_on(chaos: Launch, tmp_path: Path) -> None:
    process, pids = hanging(chaos, tmp_path)
    for pid in (process.pid, *pids["ranks"]):  # a terminal sends it to all of them
        os.kill(pid, signal.SIGQUIT)
    shown = ""
    while "==== controller ====" not in shown:
        shown += process.stderr.readline()
    assert all(f"pid {pid}" in shown for pid in pids["ranks"])
    assert "in hang" in shown
    assert not any(map(gone, [pids["controller"], *pids["ranks"]]))
    process.send_signal(signal.SIGTERM)
    assert outcome(process)[0] == 128 + signal.SIGTERM


def test_stacks_of_a_live_run(launch: Launch, chaos: Launch, tmp_path: Path) -> None:
    process, pids = hanging(chaos, tmp_path)
    code, out, last = outcome(launch("stacks", "runs/chaos"))
    assert code == 0, last
    assert all(f"pid {pid}" in out for pid in pids["ranks"])
    assert "in hang" in out
    assert "actor.hang.call()" in out, "the controller's own stack"
    os.kill(pids["controller"], signal.SIGKILL)
    outcome(process)
    code, _, last = outcome(launch("stacks", "runs/chaos"))
    assert code == 2
    assert last.startswith("no run is going on in runs/chaos")


def test_ending_the_run_from_outside(chaos: Launch) -> None:
    process = chaos("hang")
    pids = report(process)
    process.send_signal(signal.SIGTERM)
    code, _, last = outcome(process)
    assert code == 128 + signal.SIGTERM
    assert last == "the run was ended from outside: every rank got SIGTERM"
    assert all(map(gone, [pids["controller"], *pids["ranks"]]))


def test_nothing_of_the_launcher_speaks_last(
    start: Start, spmd_rl_with_heartbeats: list[str]
) -> None:
    process = start([*spmd_rl_with_heartbeats, "--nproc=2", "--scenario=hang"])
    report(process)
    process.send_signal(signal.SIGTERM)
    code, _, last = outcome(process)
    assert code == 128 + signal.SIGTERM
    assert last == "the run was ended from outside: every rank got SIGTERM"


def test_wrong_secret(start: Start, torchrun_with_two_secrets: list[str]) -> None:
    process = start(torchrun_with_two_secrets)
    _, err = process.communicate(timeout=LAST_RESORT_S)
    assert process.returncode != 0
    assert "rank 1 and the controller" in err
    assert "hold different secrets" in err
