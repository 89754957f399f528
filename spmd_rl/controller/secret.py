"""The per-run secret and the CURVE keys of both ends, derived from it.

Whoever holds the secret can speak to the run, nobody else: the controller admits the one client key, and a
worker's socket opens only to the one server key.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from spmd_rl.errors import ConfigError

SECRET_BYTES = 32
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


def derive(secret: bytes) -> Keys:
    """Both ends' keys. Raises: ConfigError when this ZeroMQ has no CURVE."""
    import zmq
    from zmq.utils import z85

    if not zmq.has("curve"):
        raise ConfigError("this build of ZeroMQ has no CURVE encryption: install pyzmq from a wheel")

    def pair(end: bytes) -> KeyPair:
        private = z85.encode(hashlib.sha256(b"spmd_rl " + end + b" " + secret).digest())
        return KeyPair(zmq.curve_public(private), private)

    return Keys(pair(b"server"), pair(b"client"))


def given() -> bytes | None:
    """The secret that the launcher's environment holds or points at, if it does either.

    Raises: ConfigError when it is unreadable, too short, or open to other users.
    """
    if SECRET_ENV in os.environ:
        return _parse(os.environ[SECRET_ENV], SECRET_ENV)
    if FILE_ENV in os.environ:
        return read(Path(os.environ[FILE_ENV]))
    return None


def create(folder: Path) -> Path:
    """Write a fresh secret to a 0600 file in `folder`."""
    path = folder / "secret"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(SECRET_BYTES))
    return path


def read(path: Path) -> bytes:
    """The secret in `path`. Raises: ConfigError as `given` does."""
    try:
        text, mode = path.read_text(encoding="ascii"), path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the run's secret cannot be read from {path} ({error}): "
            f"give every node the same one by {FILE_ENV} or {SECRET_ENV}"
        ) from error
    if mode & 0o077:
        raise ConfigError(f"the secret file {path} is open to other users: chmod 600 it")
    return _parse(text, str(path))


def _parse(text: str, where: str) -> bytes:
    try:
        secret = bytes.fromhex(text.strip())
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise ConfigError(f"{where} must hold a secret of {SECRET_BYTES} bytes in hex (`openssl rand -hex 32`)")
    return secret
