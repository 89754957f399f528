"""Another user of the host, who writes to every key-value store of torch behind open ports.

It writes an address of its own as the controller's, as rank 0 does. Each line of its input holds
ports. Each line of its output holds the ports that accepted what it wrote, and how often its own
address has been dialled.
"""

import json
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

KEY = "spmd_rl/endpoint"
PREFIXES = ("", "spmd_rl/0/", "spmd_rl/1/")
PATIENCE = timedelta(seconds=1)
NOBODY = 65534


def write_to(port: int, lie: str) -> bool:
    """Return whether a store listens there and has accepted the lie."""
    try:
        store = TCPStore(
            "127.0.0.1", port, is_master=False, timeout=PATIENCE, wait_for_workers=False
        )
        for prefix in PREFIXES:
            store.set(prefix + KEY, lie)
        return store.get(KEY) == lie.encode()
    except RuntimeError:
        return False


def become_nobody(folder: Path) -> None:
    """Become another user, if this is root's process.

    That user may not be able to read the interpreter's files, so it comes after all imports.
    """
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def main(folder: Path) -> None:
    become_nobody(folder)
    secret = folder / "secret"
    secret.write_text("ab" * 32)
    secret.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        lie = json.dumps({"endpoint": endpoint, "generation": 7, "secret_file": str(secret)})
        num_dialled = 0
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            taken = [port for port in json.loads(line) if write_to(port, lie)]
            try:
                while True:
                    listener.accept()
                    num_dialled += 1
            except BlockingIOError:
                pass
            print(json.dumps({"taken": taken, "dialled": num_dialled}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
