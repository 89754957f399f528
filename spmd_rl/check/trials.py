"""One trial on the GPUs, as a program: it prints one line, or ends with an error.

python -m spmd_rl.check.trials gpus | nccl | ipc
"""

from __future__ import annotations

import json
import sys

from spmd_rl.check import probe

NUMBERS = 1 << 20


def _gpus() -> str:
    import torch

    names, strangers, error = [], [], ""
    try:
        torch.cuda.init()
        num = torch.cuda.device_count()
        names = [torch.cuda.get_device_name(index) for index in range(num)]
        pairs = [(a, b) for a in range(num) for b in range(num) if a != b]
        strangers = [
            (a, b) for a, b in pairs if a < b and not torch.cuda.can_device_access_peer(a, b)
        ]
    # no driver, or no CUDA in this torch: the finding says so
    except (RuntimeError, AssertionError) as raised:
        error = str(raised).splitlines()[0]
    return json.dumps(
        {"cuda": torch.version.cuda, "names": names, "strangers": strangers, "error": error}
    )


def _nccl() -> str:
    import torch
    from torch.cuda import nccl

    ones = [torch.ones(NUMBERS, device=f"cuda:{index}") for index in range(2)]
    nccl.all_reduce(ones)
    for index, one in enumerate(ones):
        torch.cuda.synchronize(index)
        if not bool((one == 2).all()):
            raise SystemExit(f"the sum over two GPUs is wrong on GPU {index}")
    return f"NCCL {'.'.join(map(str, nccl.version()))} sums over two GPUs"


def _ipc() -> str:
    """Share memory with a grandchild, which reads it."""
    import torch

    numbers = torch.arange(NUMBERS, dtype=torch.float32, device="cuda")
    torch.cuda.synchronize()
    handle = [
        part.hex() if isinstance(part, bytes) else part
        for part in numbers.untyped_storage()._share_cuda_()
    ]
    reader = probe.run("reader", json.dumps(handle), within_s=probe.PROBE_S / 2)
    if not reader.ok:
        raise SystemExit(
            f"another process cannot open a handle of this GPU's memory: {reader.said}"
        )
    if float(reader.said) != float(numbers.double().sum()):
        raise SystemExit(
            f"another process read other numbers through a handle: their sum is {reader.said}"
        )
    return "another process reads this GPU's memory through a handle"


def _reader(handle: str) -> str:
    import torch

    torch.cuda.init()
    parts = [bytes.fromhex(part) if isinstance(part, str) else part for part in json.loads(handle)]
    storage = torch.UntypedStorage._new_shared_cuda(*parts)
    numbers = torch.empty(0, dtype=torch.float32, device=storage.device).set_(storage)
    return str(float(numbers[:NUMBERS].double().sum()))


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
