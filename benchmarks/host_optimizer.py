"""AdamW with moments in host memory: streamed through the GPU, or stepped on the CPU.

The state has the sizes of a model's parameters: of Qwen3-8B, 33 GB of weights and 66 GB of moments.
Both arms begin with the same weights and gradients on the GPU, and end with new weights there.

    streamed   chunks of the moments pass through the GPU, which updates them (streamed_adamw.py)
    CPU        chunks of the gradients go to the host, whose cores update its own weights and
               moments; chunks of the new weights come back. Copies run beside the update

Beside them is a plain copy between pinned host memory and the GPU, both ways at once: the bound of
the streamed arm, which copies the moments out and back. Arms take turns. Values are medians of the
host's clock around a step, with the GPU drained before and after.

    python -m benchmarks.host_optimizer [--model 8B] [--repeats 5] [--save]

It needs 12 bytes of host memory for a parameter and 8 of the GPU's: 8B takes 98 GB and 66 GB. The
CPU's arm holds weights and moments on the host, and the streamed arm takes the same moments.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.record import compared, finish, gpu, gpu_machine, measured
from benchmarks.shapes import QWEN3, write_config
from benchmarks.table import Row
from spmd_rl.offload.role_memory import RoleMemory
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.optimizer.moment_chunks import CHUNK_ELEMENTS, NUM_SLOTS, Chunk
from spmd_rl.train.optimizer.moment_stream import MomentStream
from spmd_rl.train.optimizer.parameter_groups import UpdateRule
from spmd_rl.train.optimizer.streamed_adamw import StreamedAdamW
from spmd_rl.weights.local_tensors import LocalTensors

DEVICE = torch.device("cuda")
RULE = UpdateRule("adamw", 1.0, 0.1)
LR = 1e-6


class OnCpu:
    """The arm that steps on the CPU, with weights and the other arm's moments on the host."""

    def __init__(
        self, weights: Sequence[Tensor], moments: Sequence[Tensor], reserve: Callable[[int], Tensor]
    ) -> None:
        self._moments = moments
        self._parts = list(_parts(weights))
        self._weights = reserve(sum(one.nbytes for one in weights)).view(torch.float32)
        size = max(count for _, _, count in self._parts)
        self._gradients = [reserve(4 * size).view(torch.float32) for _ in range(NUM_SLOTS)]
        self._arrived = [torch.cuda.Event() for _ in range(NUM_SLOTS)]
        self._to_host, self._to_device = torch.cuda.Stream(), torch.cuda.Stream()
        self._steps = torch.zeros(())
        ends = list(accumulate(count for _, _, count in self._parts))
        self._begins = [0, *ends[:-1]]
        for (tensor, start, count), begin in zip(self._parts, self._begins, strict=True):
            self._weights[begin : begin + count].copy_(_range(tensor, start, count))

    def step(self) -> None:
        self._steps += 1
        for number in range(NUM_SLOTS):
            self._fetch(number)
        for number, (tensor, start, count) in enumerate(self._parts):
            slot = number % NUM_SLOTS
            self._arrived[slot].synchronize()
            begin = self._begins[number]
            own = self._weights[begin : begin + count]
            moments = [one[begin : begin + count] for one in self._moments]
            _update(own, self._gradients[slot][:count], moments, self._steps)
            with torch.cuda.stream(self._to_device):
                _range(tensor, start, count).copy_(own, non_blocking=True)
            self._fetch(number + NUM_SLOTS)
        torch.cuda.synchronize()

    def _fetch(self, number: int) -> None:
        """Begin to copy a part's gradients to the host, into a slot that is free."""
        if number >= len(self._parts):
            return
        tensor, start, count = self._parts[number]
        assert tensor.grad is not None
        slot = number % NUM_SLOTS
        with torch.cuda.stream(self._to_host):
            source = _range(tensor.grad, start, count)
            self._gradients[slot][:count].copy_(source, non_blocking=True)
            self._arrived[slot].record()


def _parts(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, int, int]]:
    """Yield each tensor's ranges of at most a chunk."""
    for tensor in tensors:
        for start in range(0, tensor.numel(), CHUNK_ELEMENTS):
            yield tensor, start, min(CHUNK_ELEMENTS, tensor.numel() - start)


def _range(tensor: Tensor, start: int, count: int) -> Tensor:
    return tensor.detach().view(-1)[start : start + count]


@torch.no_grad()
def _update(weight: Tensor, gradient: Tensor, moments: Sequence[Tensor], steps: Tensor) -> None:
    cfg = TrainerConfig()
    torch._fused_adamw_(
        [weight],
        [gradient],
        [moments[0]],
        [moments[1]],
        [],
        [steps],
        lr=LR,
        beta1=cfg.betas[0],
        beta2=cfg.betas[1],
        weight_decay=RULE.weight_decay,
        eps=cfg.eps,
        amsgrad=False,
        maximize=False,
    )


def seconds_of(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def copying(moments: Sequence[Tensor]) -> Callable[[], None]:
    """Return a function that copies the moments to the GPU and, at once, as many bytes back."""
    ways = [torch.cuda.Stream(), torch.cuda.Stream()]
    size = min(CHUNK_ELEMENTS * 4, len(moments[0]))
    buffers = [torch.zeros(size, device=DEVICE) for _ in ways]

    def run() -> None:
        for one, other in zip(moments, reversed(moments), strict=True):
            for start in range(0, len(one), size):
                count = min(size, len(one) - start)
                with torch.cuda.stream(ways[0]):
                    buffers[0][:count].copy_(one[start : start + count], non_blocking=True)
                with torch.cuda.stream(ways[1]):
                    other[start : start + count].copy_(buffers[1][:count], non_blocking=True)

    return run


def measure(name: str, repeats: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        shapes = write_config(name, Path(folder)).parameter_shapes()
    generator = torch.Generator(DEVICE).manual_seed(0)
    weights: dict[str, nn.Parameter] = {}
    for key, shape in shapes.items():
        weights[key] = nn.Parameter(torch.randn(shape, device=DEVICE, generator=generator))
        weights[key].grad = torch.randn(shape, device=DEVICE, generator=generator)
    reserve = RoleMemory(None, DEVICE).reserve
    streamed = StreamedAdamW(
        LocalTensors.whole(weights), dict.fromkeys(shapes, RULE), TrainerConfig(), reserve
    )
    moments = streamed._moments
    on_cpu = OnCpu(list(weights.values()), moments, reserve)
    arms: dict[str, Callable[[], None]] = {
        "streamed": lambda: streamed.step(LR),
        "CPU": on_cpu.step,
        "copies": copying(moments),
        "update": lambda: on_gpu(streamed),
    }
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for repeat in range(1 + repeats):
        for arm in list(arms)[:: 1 if repeat % 2 else -1]:
            spent = seconds_of(arms[arm])
            print(f"{name} {arm}: {spent:.3f} s", flush=True)
            if repeat:
                times[arm].append(spent)
    yield from rows(f"Qwen3-{name}", times, sum(map(prod, shapes.values())))


def on_gpu(streamed: StreamedAdamW) -> None:
    """Run the updates of a step without copies: on slots whose content is undefined."""
    slots = [torch.zeros(CHUNK_ELEMENTS, device=DEVICE) for _ in range(2)]

    def run(self: MomentStream, chunks: Sequence[Chunk], update: Callable[..., None]) -> None:
        for chunk in chunks:
            update(chunk, [one[: chunk.count] for one in slots])

    plain, MomentStream.run = MomentStream.run, run  # type: ignore[method-assign]
    try:
        streamed.step(0.0)
    finally:
        MomentStream.run = plain  # type: ignore[method-assign]


def rows(what: str, times: dict[str, list[float]], num_parameters: int) -> Iterator[Row]:
    middle = {arm: statistics.median(spent) for arm, spent in times.items()}
    yield compared(
        f"{what}: optimizer step, moments streamed through the GPU",
        middle["streamed"],
        "s",
        peer="stepped on the CPU",
        peer_value=middle["CPU"],
        at_most=1.0,
    )
    yield compared(
        f"{what}: streamed step",
        middle["streamed"],
        "s",
        peer="plain pinned copies both ways",
        peer_value=middle["copies"],
        at_most=1 / 0.9,
    )
    rate = 8 * num_parameters / 2**30 / middle["streamed"]
    yield measured(f"{what}: streamed, each way", rate, "GiB/s")
    yield measured(f"{what}: the same updates with all on the GPU", middle["update"], "s")
    yield measured(f"{what}: threads of the CPU's step", torch.get_num_threads(), "")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=QWEN3, default="8B")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    found = list(measure(options.model, options.repeats))
    return finish(__file__, ("torch",), found, save=options.save, machine=gpu_machine(), **gpu())


if __name__ == "__main__":
    sys.exit(main())
