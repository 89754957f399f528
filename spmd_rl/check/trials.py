"""Program for one trial on the GPUs: it prints one line of result, or exits with an error.

python -m spmd_rl.check.trials gpus | nccl | ipc
"""

from __future__ import annotations

import json
import sys
from itertools import combinations

from spmd_rl.check import probe

NUM_VALUES = 1 << 20


def _gpus() -> str:
    import torch

    names, no_peer_access, error = [], [], ""
    try:
        torch.cuda.init()
        num_gpus = torch.cuda.device_count()
        names = [torch.cuda.get_device_name(index) for index in range(num_gpus)]
        pairs = combinations(range(num_gpus), 2)
        no_peer_access = [(a, b) for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    # no driver, or a torch without CUDA: becomes a finding
    except (RuntimeError, AssertionError) as raised:
        error = str(raised).splitlines()[0]
    return json.dumps(
        {
            "cuda": torch.version.cuda,
            "names": names,
            "no_peer_access": no_peer_access,
            "error": error,
        }
    )


def _nccl() -> str:
    import torch
    from torch.cuda import nccl

    ones = [torch.ones(NUM_VALUES, device=f"cuda:{index}") for index in range(2)]
    nccl.all_reduce(ones)
    for index, sums in enumerate(ones):
        torch.cuda.synchronize(index)
        if not bool((sums == 2).all()):
            raise SystemExit(f"the sum over two GPUs is wrong on GPU {index}")
    return f"NCCL {'.'.join(map(str, nccl.version()))} sums over two GPUs"


def _ipc() -> str:
    """Share GPU memory with a child process, which reads it."""
    import torch

    numbers = torch.arange(NUM_VALUES, dtype=torch.float32, device="cuda")
    torch.cuda.synchronize()
    handle = [
        part.hex() if isinstance(part, bytes) else part
        for part in numbers.untyped_storage()._share_cuda_()
    ]
    reader = probe.run_trial("reader", json.dumps(handle), within_s=probe.TRIAL_S / 2)
    if not reader.ok:
        raise SystemExit(f"another process cannot open a CUDA IPC handle: {reader.output}")
    if float(reader.output) != float(numbers.double().sum()):
        raise SystemExit(
            f"another process reads wrong values through a CUDA IPC handle: {reader.output}"
        )
    return "another process reads this GPU's memory through a CUDA IPC handle"


def _reader(handle: str) -> str:
    import torch

    torch.cuda.init()
    parts = [bytes.fromhex(part) if isinstance(part, str) else part for part in json.loads(handle)]
    storage = torch.UntypedStorage._new_shared_cuda(*parts)
    numbers = torch.empty(0, dtype=torch.float32, device=storage.device).set_(storage)
    return str(float(numbers[:NUM_VALUES].double().sum()))


def main(words: list[str]) -> str:
    match words:
        case ["gpus"]:
            return _gpus()
        case ["nccl"]:
            return _nccl()
        case ["ipc"]:
            return _ipc()
        case ["reader", handle]:
            return _reader(handle)
    raise SystemExit(f"unknown trial {words}")


if __name__ == "__main__":
    print(main(sys.argv[1:]))
