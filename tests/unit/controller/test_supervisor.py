from __future__ import annotations

from pathlib import Path

import pytest

from spmd_rl.controller.supervisor import private_folder


@pytest.mark.parametrize(("runtime", "parent"), [("here", "here"), ("of/another/host", "tmp"), ("", "tmp")])
def test_the_private_folder_is_on_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str, parent: str
) -> None:
    """A batch system hands on the variables of the host that the job was submitted from."""
    for name in ("here", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / runtime) if runtime else "")
    folder = private_folder()
    assert folder.parent == tmp_path / parent
    assert folder.stat().st_mode & 0o777 == 0o700
