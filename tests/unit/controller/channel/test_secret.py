"""Secret of a run: where it comes from, and which are refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from spmd_rl.controller.channel import secret
from spmd_rl.controller.channel.address import bind_address
from spmd_rl.errors import ConfigError
from spmd_rl.mesh.world import World


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (secret.SECRET_ENV, secret.FILE_ENV, "SPMD_RL_INTERFACE"):
        monkeypatch.delenv(name, raising=False)


def test_a_made_secret_is_private_and_fresh(tmp_path: Path) -> None:
    os.umask(os.umask(0))
    path = secret.create(tmp_path / "secret")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret.read(path) != secret.read(secret.create(tmp_path / "other"))
    with pytest.raises(FileExistsError):
        secret.create(path)


def test_keys_follow_from_the_secret_alone() -> None:
    a, again, b = (
        secret.derive_keys(b"a" * 32),
        secret.derive_keys(b"a" * 32),
        secret.derive_keys(b"b" * 32),
    )
    assert a == again
    assert len({a.server.private, a.client.private, b.server.private, b.client.private}) == 4


@pytest.mark.parametrize("text", ["", "ab", "zz" * 32, "ab" * 31])
def test_weak_secrets_are_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(secret.SECRET_ENV, text)
    with pytest.raises(ConfigError, match="must hold a secret of 32 bytes"):
        secret.from_environment()


def test_open_or_missing_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert secret.from_environment() is None
    path = secret.create(tmp_path / "secret")
    monkeypatch.setenv(secret.FILE_ENV, str(path))
    assert secret.from_environment() == secret.read(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        secret.from_environment()
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        secret.from_environment()


def test_only_a_regular_file_of_this_user_is_read(tmp_path: Path) -> None:
    path = secret.create(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(ConfigError, match="not a regular file of this user"):
        secret.read(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="cannot be read"):
        secret.read(tmp_path / "link")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_a_secret_of_another_user_is_refused(tmp_path: Path) -> None:
    path = secret.create(tmp_path / "secret")
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="not a regular file of this user"):
        secret.read(path)


def test_the_file_that_was_checked_is_the_one_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = secret.create(tmp_path / "secret")
    good = secret.read(path)
    checked = os.fstat

    def swap(descriptor: int) -> os.stat_result:
        found = checked(descriptor)
        path.unlink(missing_ok=True)
        path.write_text("ab" * 32)
        return found

    monkeypatch.setattr(os, "fstat", swap)
    assert secret.read(path) == good


def test_several_nodes_must_be_given_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    secret.require_on_many_nodes(world(1))
    with pytest.raises(ConfigError, match=f"export {secret.FILE_ENV} on every node"):
        secret.require_on_many_nodes(world(2))
    monkeypatch.setenv(secret.SECRET_ENV, "ab" * 32)
    secret.require_on_many_nodes(world(2))


def world(num_nodes: int) -> World:
    return World(0, 2 * num_nodes, 0, 2, 0, "run", 0)


def test_one_node_listens_on_a_socket_file(tmp_path: Path) -> None:
    assert bind_address(world(1), Path("/tmp/x")) == "ipc:///tmp/x/controller.sock"
    assert bind_address(world(1), Path("/tmp" + "/long" * 30)) == "tcp://127.0.0.1:*"


@pytest.mark.parametrize(
    ("interface", "bound"),
    [
        ("eth7", "tcp://eth7:*"),
        ("lo", "tcp://lo:*"),  # for several torchruns of one host
        ("10.0.0.3", "tcp://10.0.0.3:*"),
        ("2001:db8::3", "tcp://[2001:db8::3]:*"),
        ("[2001:db8::3]", "tcp://[2001:db8::3]:*"),
        (None, "tcp://10.1.2.3:*"),
    ],
)
def test_many_nodes_listen_on_one_interface(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, interface: str | None, bound: str
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.1.2.3")
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "lo"), (2, "eth7")])
    if interface:
        monkeypatch.setenv("SPMD_RL_INTERFACE", interface)
    assert bind_address(world(2), tmp_path) == bound


@pytest.mark.parametrize("interface", ["*", "0.0.0.0", "::", "127.0.0.1", "::1", "localhost"])
def test_every_interface_and_loopback_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, interface: str
) -> None:
    monkeypatch.setenv("SPMD_RL_INTERFACE", interface)
    with pytest.raises(ConfigError, match="SPMD_RL_INTERFACE"):
        bind_address(world(2), tmp_path)


def test_an_unknown_interface_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPMD_RL_INTERFACE", "no such interface")
    with pytest.raises(ConfigError, match="'no such interface' is no interface of this host"):
        bind_address(world(2), tmp_path)
