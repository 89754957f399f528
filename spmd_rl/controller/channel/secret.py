"""Secret of a run, and the CURVE keys of both ends, which are derived from it.

Only a process that holds the secret can talk to the run: the controller admits one client key, and
a worker connects to one server key.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from spmd_rl.errors import ConfigError
from spmd_rl.mesh.private_folder import meeting_folder
from spmd_rl.mesh.world import World

SECRET_BYTES = 32
MAX_FILE_BYTES = 1000
SECRET_ENV = "SPMD_RL_SECRET"
FILE_ENV = "SPMD_RL_SECRET_FILE"


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair in Z85, as ZeroMQ takes it."""

    public: bytes
    private: bytes


@dataclass(frozen=True)
class Keys:
    server: KeyPair
    client: KeyPair


def derive_keys(secret: bytes) -> Keys:
    """Return the keys of both ends. Raises: ConfigError when this ZeroMQ has no CURVE."""
    import zmq
    from zmq.utils import z85

    if not zmq.has("curve"):
        raise ConfigError(
            "this build of ZeroMQ has no CURVE encryption: install pyzmq from a wheel"
        )

    def pair(end: bytes) -> KeyPair:
        private = z85.encode(hashlib.sha256(b"spmd_rl " + end + b" " + secret).digest())
        return KeyPair(zmq.curve_public(private), private)

    return Keys(pair(b"server"), pair(b"client"))


def from_environment() -> bytes | None:
    """Return the secret that the environment holds or names the file of; None without either.

    Raises: ConfigError when it cannot be read, is too short, or is open to other users.
    """
    if SECRET_ENV in os.environ:
        return _parse(os.environ[SECRET_ENV], SECRET_ENV)
    if FILE_ENV in os.environ:
        return read(Path(os.environ[FILE_ENV]))
    return None


def require_on_many_nodes(world: World) -> None:
    """Raise ConfigError when a run on several nodes has no secret in its environment.

    The nodes share no private folder in which rank 0 could leave one.
    """
    if world.num_nodes > 1 and from_environment() is None:
        raise ConfigError(
            f"a run on {world.num_nodes} nodes has to be given a secret: "
            f"write one to a file of mode 0600 (`openssl rand -hex {SECRET_BYTES}`) "
            f"and export {FILE_ENV} on every node"
        )


def generated_file() -> Path:
    """Return the file through which rank 0 gives the other ranks a secret that it generated."""
    return meeting_folder().path / "secret"


def create(path: Path) -> Path:
    """Write a new secret to `path`, a new file of mode 0600, and return `path`."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(SECRET_BYTES))
    return path


def read(path: Path) -> bytes:
    """Return the secret in `path`. Raises: ConfigError as `from_environment` does."""
    try:
        # opening a named pipe would block
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise ConfigError(
                    f"the secret file {path} is not a regular file of this user: "
                    "make one of your own"
                )
            if stat.S_IMODE(status.st_mode) & 0o077:
                raise ConfigError(f"the secret file {path} is open to other users: chmod 600 it")
            text = file.read(MAX_FILE_BYTES).decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the run's secret cannot be read from {path} ({error}): "
            f"give every node the same one by {FILE_ENV} or {SECRET_ENV}"
        ) from error
    return _parse(text, str(path))


def _parse(text: str, where: str) -> bytes:
    try:
        secret = bytes.fromhex(text.strip())
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise ConfigError(
            f"{where} must hold a secret of {SECRET_BYTES} bytes in hex (`openssl rand -hex 32`)"
        )
    return secret
