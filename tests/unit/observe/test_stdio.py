from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest

from spmd_rl.observe.stdio import FailsafeStream, make_stdio_failsafe


def _without_reader() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def _on_a_full_disk() -> TextIO:
    return open("/dev/full", "w")


@pytest.mark.parametrize(
    ("opened", "why"),
    [(_without_reader, "Broken pipe"), (_on_a_full_disk, "No space left on device")],
)
def test_a_stream_without_a_reader_ends_nothing(
    opened: Callable[[], TextIO], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = opened()
    lasting = FailsafeStream(stream)
    print("step 1/3", file=lasting, flush=True)
    print("step 2/3", file=lasting, flush=True)
    assert (
        capsys.readouterr().err
        == f"cannot write to {stream.name} any more ({why}): its further output is discarded\n"
    ), "once"
    stream.close()  # what was buffered has gone, too


def test_it_is_the_stream_otherwise(tmp_path: Path) -> None:
    with open(tmp_path / "out", "w") as stream:
        lasting = FailsafeStream(stream)
        print("step 1/3", file=lasting, flush=True)
        assert (lasting.fileno(), lasting.isatty()) == (stream.fileno(), False)
    assert (tmp_path / "out").read_text() == "step 1/3\n"


def test_a_stream_that_was_closed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    make_stdio_failsafe()
    print("step 1/3", flush=True)
    assert not sys.stdout.isatty()
    sys.stdout.close()
