"""The disk cache: what it trusts, what it refuses, and two processes at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spmd_rl.kernels.runtime import disk_cache, preload
from spmd_rl.kernels.runtime.disk_cache import FOLDER_ENV, DiskCache, cache_name, user_cache


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "cache"


def test_what_was_written_is_read_by_another_process(folder: Path) -> None:
    DiskCache(folder).write("kernel", b"code")
    assert DiskCache(folder).read("kernel") == b"code"
    assert DiskCache(folder).read("other") is None
    DiskCache(folder).write("kernel", b"")
    assert DiskCache(folder).read("kernel") == b""


def test_only_the_user_may_enter(folder: Path) -> None:
    DiskCache(folder).write("kernel", b"code")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600]


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o702, 0o500])
def test_a_folder_of_another_mode_is_refused(folder: Path, mode: int) -> None:
    DiskCache(folder).write("kernel", b"code")
    folder.chmod(mode)
    with pytest.warns(UserWarning, match=r"compiled anew.*mode is not 0700.*SPMD_RL_CACHE_DIR"):
        refused = DiskCache(folder)
    assert refused.read("kernel") is None
    refused.write("more", b"code")
    folder.chmod(0o700)
    assert [path.name for path in folder.iterdir()] == ["kernel"]


def test_a_folder_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DiskCache(folder).write("kernel", b"code")
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.warns(UserWarning, match="its owner is not this user"):
        assert DiskCache(folder).read("kernel") is None


def test_a_link_to_a_folder_is_refused(tmp_path: Path, folder: Path) -> None:
    DiskCache(folder).write("kernel", b"code")
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.warns(UserWarning, match="is not used"):
        assert DiskCache(link).read("kernel") is None


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.warns(UserWarning, match="is not used"):
        assert DiskCache(tmp_path / "cache").read("kernel") is None
    with pytest.warns(UserWarning, match="is not used"):
        assert DiskCache(tmp_path / "cache" / "below").read("kernel") is None


def test_a_folder_that_another_takes_the_place_of_is_not_entered(folder: Path) -> None:
    """The folder that was checked is the one that is read, whatever has its name now."""
    cache = DiskCache(folder)
    cache.write("kernel", b"code")
    folder.rename(folder.with_name("moved"))
    DiskCache(folder).write("kernel", b"crafted")
    assert cache.read("kernel") == b"code"


def _other_mode(path: Path) -> None:
    path.chmod(0o660)


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _second_name(path: Path) -> None:
    path.with_name("second").hardlink_to(path)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _flipped_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    "craft", [_other_mode, _link, _second_name, _pipe, _flipped_bit, _cut, _empty]
)
def test_a_crafted_file_is_refused_and_replaced(folder: Path, craft: object) -> None:
    cache = DiskCache(folder)
    cache.write("kernel", b"code")
    craft(folder / "kernel")  # type: ignore[operator]
    with pytest.warns(UserWarning, match="kernel is not used.*SPMD_RL_CACHE_DIR"):
        assert cache.read("kernel") is None
    cache.write("kernel", b"new")
    assert cache.read("kernel") == b"new"


def test_a_folder_in_place_of_a_file_is_survived(folder: Path) -> None:
    cache = DiskCache(folder)
    cache.write("kernel", b"code")
    _folder(folder / "kernel")
    with pytest.warns(UserWarning, match="kernel is not used"):
        assert cache.read("kernel") is None
    with pytest.warns(UserWarning, match="kernel is not kept"):
        cache.write("kernel", b"new")
    assert [path.name for path in folder.iterdir()] == ["kernel"]


def test_a_file_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DiskCache(folder)
    cache.write("kernel", b"code")
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.warns(UserWarning, match="belongs to this user alone"):
        assert cache.read("kernel") is None


def test_a_full_disk_is_survived(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DiskCache(folder)

    def full(*given: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", full)
        with pytest.warns(UserWarning, match="kernel is not kept .No space left on device"):
            cache.write("kernel", b"code")
    assert list(folder.iterdir()) == []


WRITER = """
import sys
from pathlib import Path
from spmd_rl.kernels.runtime.disk_cache import DiskCache
cache, own = DiskCache(Path(sys.argv[1])), sys.argv[2].encode() * (1 << 20)
whole = {None, b"a" * (1 << 20), b"b" * (1 << 20)}
for _ in range(40):
    cache.write("kernel", own)
    assert cache.read("kernel") in whole - {None}
"""


def test_two_writers_at_once_leave_whole_files(folder: Path) -> None:
    """Both write and read the same name; a damaged file would be a warning, which is an error."""
    command = [sys.executable, "-W", "error", "-c", WRITER, str(folder)]
    writers = [subprocess.Popen([*command, letter]) for letter in "ab"]
    assert [writer.wait(timeout=300) for writer in writers] == [0, 0]
    assert DiskCache(folder).read("kernel") in (b"a" * (1 << 20), b"b" * (1 << 20))
    assert [path.name for path in folder.iterdir()] == ["kernel"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"SPMD_RL_CACHE_DIR": "/a/b"}, "/a/b"),
        ({"SPMD_RL_CACHE_DIR": "/a/b", "XDG_CACHE_HOME": "/x"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/spmd_rl"),
        ({}, "/home/me/.cache/spmd_rl"),
        ({"SPMD_RL_CACHE_DIR": ""}, None),
    ],
)
def test_where_the_cache_is(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], expected: str | None
) -> None:
    for name in ("SPMD_RL_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (settings | {"HOME": "/home/me"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(disk_cache, "DiskCache", str)
    assert user_cache.__wrapped__() == expected


KEY = ("kernel", (64, 1.5, True, None, "x"), float)


def test_a_name_is_the_same_in_all_processes() -> None:
    program = (
        "from spmd_rl.kernels.runtime.disk_cache import cache_name;"
        "print(cache_name('kind', 'ker' + 'nel', (64, 1.5, True, None, 'x'), float))"
    )
    command = [sys.executable, "-c", program]
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    found = subprocess.check_output(command, env=environment, text=True)
    assert found.strip() == cache_name("kind", *KEY)


@pytest.mark.parametrize(
    "other",
    [
        ("kernel", (64, 1.5, True, None, "y"), float),
        ("kernel", (64, 1.5, 1, None, "x"), float),
        ("kernel", (64, 1.5, True, "None", "x"), float),
        ("kernel", (64, 1.5, True, None), "x", float),
        ("kernel", (64, 1.5, True, None, "x"), int),
        ("kernel", (64, 1.5, True, None, "x"), "<builtins.float>"),
        ("kernel,(64", (1.5, True, None, "x"), float),
    ],
)
def test_another_key_has_another_name(other: tuple[object, ...]) -> None:
    assert cache_name("kind", *other) != cache_name("kind", *KEY)
    assert cache_name("other", *KEY) != cache_name("kind", *KEY)


def test_a_key_without_a_stable_text_has_no_name() -> None:
    with pytest.raises(TypeError, match="object is no part of a cache's key"):
        cache_name("kind", (1, object()))


@pytest.mark.parametrize(("library", "variable"), preload.CACHES.items())
def test_libraries_keep_their_kernels_in_the_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, variable: str
) -> None:
    for folder, expected in ((tmp_path / "mine", str(tmp_path / "mine" / library)), ("", None)):
        for one in preload.CACHES.values():
            monkeypatch.delenv(one, raising=False)
        monkeypatch.setenv(FOLDER_ENV, str(folder))
        user_cache.cache_clear()
        preload.keep_caches_private()
        assert os.environ.get(variable) == expected
    user_cache.cache_clear()


@pytest.mark.parametrize("variable", preload.CACHES.values())
def test_libraries_keep_their_kernels_where_the_user_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(FOLDER_ENV, str(tmp_path / "mine"))
    for one in preload.CACHES.values():
        monkeypatch.setenv(one, "elsewhere")
    user_cache.cache_clear()
    preload.keep_caches_private()
    assert os.environ[variable] == "elsewhere"
    user_cache.cache_clear()
