"""Experts of Qwen3-30B-A3B on one GPU: a decoding step, and a trainer's passes of 32,768 tokens.

The layers have random weights, so tokens go to nearly all experts alike, which reads more bytes
than a trained router would. A decoding step is 48 layers, one after the other, in one graph. Its
floor is the time to read the router and the experts that this very run touched once, at the speed
of a large copy just before. SGLang's fused kernel gets the same routes and the same weights, if the
package can be imported; ours is then timed without its router too.

A trainer's passes are beside the same layer of `torch._grouped_mm`. Its rows say whether that has
our bits, too.

    python -m benchmarks.moe_kernels [--save]
    python -m benchmarks.moe_kernels --tune [--seconds 240]

With --tune, it prints the fastest of the tiles in benchmarks/moe_tiles.py for each shape.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import moe_tiles
from benchmarks.kernels.timing import copy_bytes_per_s, in_turns
from benchmarks.record import compared, counted, finish, gpu, gpu_machine, measured
from benchmarks.table import Row
from spmd_rl.kernels import linear_fp32
from spmd_rl.kernels.moe.combine_triton import sum_slots
from spmd_rl.kernels.moe.expert_addresses import Addresses, addresses
from spmd_rl.kernels.moe.experts import ExpertWeights, experts_output
from spmd_rl.kernels.moe.grouped_tiles import OUTER, choose_tiles
from spmd_rl.kernels.moe.grouped_triton import (
    grouped_matmul,
    grouped_matmul_turned,
    grouped_outer,
    rows_to_experts,
)
from spmd_rl.kernels.moe.order_triton import DeviceOrder, order_on_device
from spmd_rl.kernels.moe.route_triton import route_on_gpu
from spmd_rl.kernels.moe.router import ExpertRoutes
from spmd_rl.model.layers.mlp import PROJECTIONS
from spmd_rl.model.layers.moe import Moe
from spmd_rl.model.layers.moe_module import MoeMlp

HIDDEN, EXPERTS, CHOSEN, INNER, LAYERS = 2048, 128, 8, 768, 48
BATCHES = (1, 8, 64, 256)
FLOOR_BARS = {1: 1.6, 8: 1.3, 64: 1.15, 256: 1.15}
PEER_BARS = {1: 0.6, 8: 0.8, 64: 0.9, 256: 0.9}
TOKENS = 32768
FORWARD_TFLOPS, BOTH_TFLOPS, PEER_BAR = 480.0, 380.0, 0.95
TUNED_LAYERS = 4
FLOPS = 2 * TOKENS * CHOSEN * 3 * HIDDEN * INNER  # of a layer's forward pass


class Layer(NamedTuple):
    """A layer, and its weights side by side. Shape: both [E, 2 F, C], down [E, C, F]."""

    module: MoeMlp
    both: Tensor
    down: Tensor


def new_layer(seed: int) -> Layer:
    generator = torch.Generator("cuda").manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        made = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        return made.normal_(std=shape[-1] ** -0.5, generator=generator)

    both, down = drawn(EXPERTS, 2 * INNER, HIDDEN), drawn(EXPERTS, HIDDEN, INNER)
    with torch.device("meta"):
        module = Moe(HIDDEN, EXPERTS, CHOSEN, INNER).module(0)
    assert isinstance(module, MoeMlp)
    module.gate.weight = nn.Parameter(drawn(EXPERTS, HIDDEN))
    for expert, gate_up, own_down in zip(module.experts, both, down, strict=True):
        gate, up = gate_up.chunk(2)
        for name, weight in (("gate", gate), ("up", up), ("down", own_down)):
            getattr(expert, f"{name}_proj").weight = nn.Parameter(weight)
    return Layer(module, both, down)


def weights_of(module: MoeMlp) -> ExpertWeights:
    return ExpertWeights(*map(module.weights, PROJECTIONS))


def routes_of(module: MoeMlp, x: Tensor) -> ExpertRoutes:
    return route_on_gpu(linear_fp32(x, module.gate.weight), CHOSEN, normalizes=True)


@cache
def sglang_experts() -> Callable[[Tensor, Layer, ExpertRoutes], Tensor] | None:
    """Return SGLang's fused experts, or None where the package is not there or does not run."""
    try:
        from sglang.srt.distributed import parallel_state
        from sglang.srt.layers.moe import MoeRunnerConfig
        from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import fused_experts
        from sglang.srt.layers.moe.topk import StandardTopKOutput
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

        set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))
        with tempfile.TemporaryDirectory() as folder:
            parallel_state.init_distributed_environment(
                1, 0, distributed_init_method=f"file://{folder}/store", local_rank=0
            )
        parallel_state.initialize_model_parallel()
        config = MoeRunnerConfig(EXPERTS, EXPERTS, inplace=False)
    except Exception:  # noqa: BLE001 (whatever a version of the peer raises, ours is measured)
        print(f"SGLang is not measured:\n{traceback.format_exc()}", file=sys.stderr)
        return None

    def run(x: Tensor, layer: Layer, routes: ExpertRoutes) -> Tensor:
        chosen = StandardTopKOutput(routes.weights, routes.ids.int(), routes.weights)
        found: Tensor = fused_experts(x, layer.both, layer.down, chosen, config)
        return found

    return run


@torch.no_grad()
def decoding(layers: Sequence[Layer], batch: int, bytes_per_s: float) -> Iterator[Row]:
    x = torch.randn(batch, HIDDEN, device="cuda").bfloat16()
    routes = [routes_of(one.module, x) for one in layers]
    touched = sum(len(one.ids.unique()) for one in routes)
    num_bytes = 2 * HIDDEN * (3 * INNER * touched + EXPERTS * len(layers))
    floor = 1e6 * num_bytes / bytes_per_s

    def ours(layer: tuple[Layer, ExpertRoutes]) -> Tensor:
        return layer[0].module(x)

    def experts_alone(layer: tuple[Layer, ExpertRoutes]) -> Tensor:
        module = layer[0].module
        return experts_output(x, layer[1], weights_of(module), module._kept)

    given = list(zip(layers, routes, strict=True))
    ways: list[Callable[[Any], object]] = [ours]
    what, peer = f"decoding, {batch} rows", sglang_experts()
    if peer is not None:
        ways += [experts_alone, lambda layer: peer(x, *layer)]
    found = [one * len(layers) for one in in_turns(ways, given, rounds=1)]
    step = f"{what}, {len(layers)} layers"
    yield measured(f"{what}, one layer", found[0] / len(layers), "us")
    yield measured(f"{what}, experts of a layer", touched / len(layers), "")
    yield compared(
        step, found[0], "us", peer="bytes touched", peer_value=floor, at_most=FLOOR_BARS[batch]
    )
    if len(found) > 1:
        yield compared(
            f"{step}, experts alone", found[1], "us", peer="SGLang's fused_experts",
            peer_value=found[2], at_most=PEER_BARS[batch],
        )  # fmt: skip


def grouped_by_torch(layer: Layer, x: Tensor, routes: ExpertRoutes, order: DeviceOrder) -> Tensor:
    """Return the layer's output by `torch._grouped_mm`, its sums over slots in any order."""
    tokens, ends = (order.slots // CHOSEN).long(), order.starts[1:]
    rows = x.index_select(0, tokens)
    gate, up = torch._grouped_mm(rows, layer.both.transpose(1, 2), offs=ends).chunk(2, 1)
    y = torch._grouped_mm(F.silu(gate) * up, layer.down.transpose(1, 2), offs=ends)
    y = y * routes.weights.flatten()[order.slots.long()].unsqueeze(1).to(y.dtype)
    return torch.zeros_like(x).index_add(0, tokens, y)


def training(layer: Layer) -> Iterator[Row]:
    x = torch.randn(TOKENS, HIDDEN, device="cuda").bfloat16()
    with torch.no_grad():
        routes = routes_of(layer.module, x)
    order = order_on_device(routes.ids, EXPERTS, choose_tiles(TOKENS * CHOSEN, EXPERTS).m)
    module, pull = layer.module, torch.randn_like(x)

    def forward(given: Any) -> None:
        with torch.no_grad():
            experts_output(given, routes, weights_of(module), module._kept)

    def torch_forward(given: Any) -> None:
        with torch.no_grad():
            grouped_by_torch(layer, given, routes, order)

    ours, peer = in_turns([forward, torch_forward], [x], rounds=1, turns=9)
    rate = FLOPS / ours / 1e6
    yield measured("forward alone, 32,768 tokens", rate, "TFLOP/s", at_least=FORWARD_TFLOPS)
    yield compared(
        "forward, 32,768 tokens", rate, "TFLOP/s", peer="torch._grouped_mm",
        peer_value=FLOPS / peer / 1e6, at_least=PEER_BAR,
    )  # fmt: skip
    own = [one for name in PROJECTIONS for one in module.weights(name)]
    both = eager_us(lambda: _step(lambda leaf: _experts(leaf, routes, module), x, own, pull))
    stacked = Layer(module, layer.both.requires_grad_(), layer.down.requires_grad_())
    peer = eager_us(
        lambda: _step(
            lambda leaf: grouped_by_torch(stacked, leaf, routes, order), x, stacked[1:], pull
        )
    )
    rate = 3 * FLOPS / both / 1e6
    what = "forward and backward, 32,768 tokens"
    yield measured(f"{what}, alone", rate, "TFLOP/s", at_least=BOTH_TFLOPS)
    yield compared(
        what, rate, "TFLOP/s", peer="torch._grouped_mm", peer_value=3 * FLOPS / peer / 1e6,
        at_least=PEER_BAR,
    )  # fmt: skip


def _experts(x: Tensor, routes: ExpertRoutes, module: MoeMlp) -> Tensor:
    return experts_output(x, routes, weights_of(module), module._kept)


def _step(
    output: Callable[[Tensor], Tensor], x: Tensor, weights: Sequence[Tensor], pull: Tensor
) -> None:
    """Compute an output and the gradients of x and of the weights."""
    leaf = x.detach().requires_grad_()
    torch.autograd.grad(output(leaf), [leaf, *weights], pull)


def eager_us(work: Callable[[], None], turns: int = 7) -> float:
    """Return the median microseconds of calls that the host launches one by one."""
    times = []
    for _ in range(turns + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return sorted(times[2:])[turns // 2]


@torch.no_grad()
def products(layer: Layer) -> Iterator[Row]:
    """Each grouped product of a training step alone, beside torch's, with its bits."""
    x = torch.randn(TOKENS, HIDDEN, device="cuda").bfloat16()
    routes = routes_of(layer.module, x)
    tiles = choose_tiles(TOKENS * CHOSEN, EXPERTS)
    order = order_on_device(routes.ids, EXPERTS, tiles.m)
    rows, ends = rows_to_experts(x, order), order.starts[1:]
    both, down = tables(layer)
    gate_up = grouped_matmul(x, both, order, tiles.up, gathers=True)
    hidden = gate_up[:, :INNER].contiguous()
    ways: dict[str, tuple[Callable[[Any], Tensor], Callable[[Any], Tensor]]] = {
        "gate and up": (
            lambda _: grouped_matmul(x, both, order, tiles.up, gathers=True),
            lambda _: torch._grouped_mm(rows, layer.both.transpose(1, 2), offs=ends),
        ),
        "down": (
            lambda _: grouped_matmul(hidden, down, order, tiles.down),
            lambda _: torch._grouped_mm(hidden, layer.down.transpose(1, 2), offs=ends),
        ),
        "gradient of down's rows": (
            lambda _: grouped_matmul_turned(x, down, order, tiles.turned, gathers=True),
            lambda _: torch._grouped_mm(rows, layer.down, offs=ends),
        ),
        "gradient of gate's and up's rows": (
            lambda _: grouped_matmul_turned(gate_up, both, order, tiles.turned),
            lambda _: torch._grouped_mm(gate_up, layer.both, offs=ends),
        ),
        "gradient of gate and up": (
            lambda _: grouped_outer(gate_up, x, order, OUTER, gathers_x=True),
            lambda _: torch._grouped_mm(gate_up.t(), rows, offs=ends),
        ),
        "gradient of down": (
            lambda _: grouped_outer(x, hidden, order, OUTER, gathers_grad=True),
            lambda _: torch._grouped_mm(rows.t(), hidden, offs=ends),
        ),
    }
    for name, pair in ways.items():
        flops = 2 * TOKENS * CHOSEN * HIDDEN * INNER * (2 if "gate" in name else 1)
        ours, peer = in_turns(pair, [None], rounds=1, turns=9)
        yield compared(
            name, flops / ours / 1e6, "TFLOP/s", peer="torch._grouped_mm",
            peer_value=flops / peer / 1e6,
        )  # fmt: skip
        same = torch.equal(pair[0](None), pair[1](None))
        yield counted(f"{name}: torch's bits are ours", [same], all_must=False)


def tables(layer: Layer) -> tuple[Addresses, Addresses]:
    weights = weights_of(layer.module)
    return addresses([weights.gate, weights.up]), addresses([weights.down])


@torch.no_grad()
def tune(seconds: float) -> None:
    """Print the fastest tiles, shape by shape, until the time is over."""
    end = time.monotonic() + seconds
    layers = [new_layer(seed) for seed in range(TUNED_LAYERS)]
    for batch in (*BATCHES, 512, 1024, 2048, TOKENS):
        few = batch * CHOSEN <= 16 * EXPERTS
        gated = [
            *(moe_tiles.FEW_GATED if few else ()),
            *(moe_tiles.MANY_GATED if batch > 64 else ()),
        ]
        plain = [
            *(moe_tiles.FEW_DOWN if few else ()),
            *(moe_tiles.MANY_PLAIN if batch > 64 else ()),
        ]
        for kind, tiles in (("gated", gated), ("down", plain), ("up", plain)):
            if kind != "up" or batch > 512:
                try_tiles(kind, batch, tiles, layers, end)
    for kind, grads in (
        ("turned down", moe_tiles.MANY_PLAIN), ("turned gate, up", moe_tiles.MANY_PLAIN),
        ("outer gate, up", moe_tiles.GRAD), ("outer down", moe_tiles.GRAD),
    ):  # fmt: skip
        try_tiles(kind, TOKENS, grads, layers[:1], end)


def try_tiles(
    kind: str, batch: int, tiles: Sequence[Any], layers: Sequence[Layer], end: float
) -> None:
    from triton.runtime.errors import OutOfResources

    x = torch.randn(batch, HIDDEN, device="cuda").bfloat16()
    found: list[tuple[float, Any]] = []
    for tile in tiles:
        if time.monotonic() > end:
            print("the time is over", flush=True)
            break
        given = [_call_of(kind, tile, x, one) for one in layers]
        try:
            took = in_turns([lambda call: call()], given, rounds=1, turns=5)[0]
        except OutOfResources as error:
            print(kind, batch, tile, error, flush=True)
            continue
        found.append((took, tile))
    for took, tile in sorted(found, key=lambda one: one[0])[:4]:
        print(f"{kind}, {batch} tokens: {took:.1f} us {tile}", flush=True)


def _call_of(kind: str, tile: Any, x: Tensor, layer: Layer) -> Callable[[], Tensor]:
    """Return a call of a kernel with this tile."""
    routes, (both, down) = routes_of(layer.module, x), tables(layer)
    order = order_on_device(routes.ids, EXPERTS, 128 if kind.startswith("outer") else tile.m)
    slots = order.num_slots
    hidden, pair = (x.new_zeros(slots, width).normal_() for width in (INNER, 2 * INNER))
    calls: dict[str, Callable[[], Tensor]] = {
        "gated": lambda: grouped_matmul(x, both, order, tile, gathers=True, gated=True),
        "up": lambda: grouped_matmul(x, both, order, tile, gathers=True),
        "down": lambda: grouped_matmul(hidden, down, order, tile, scales=routes.weights),
        "turned down": lambda: grouped_matmul_turned(x, down, order, tile, gathers=True),
        "turned gate, up": lambda: grouped_matmul_turned(pair, both, order, tile),
        "outer gate, up": lambda: grouped_outer(pair, x, order, tile, gathers_x=True),
        "outer down": lambda: grouped_outer(x, hidden, order, tile, gathers_grad=True),
    }
    return calls[kind]


@torch.no_grad()
def small_parts(layer: Layer) -> Iterator[Row]:
    """The kernels around the products, at the tokens of a decoding step and of a trainer."""
    for tokens in (1, 64, 256, TOKENS):
        x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        logits = linear_fp32(x, layer.module.gate.weight)
        routes = route_on_gpu(logits, CHOSEN, normalizes=True)
        tile_rows = choose_tiles(tokens * CHOSEN, EXPERTS).m
        order = order_on_device(routes.ids, EXPERTS, tile_rows)
        y = x.new_zeros(tokens * CHOSEN, HIDDEN)
        for name, op in {
            "router": lambda _, x=x: linear_fp32(x, layer.module.gate.weight),
            "route": lambda _, z=logits: route_on_gpu(z, CHOSEN, normalizes=True),
            "order": lambda _, r=routes, m=tile_rows: order_on_device(r.ids, EXPERTS, m),
            "sum over slots": lambda _, y=y, o=order: sum_slots(y, o),
        }.items():
            took = in_turns([op], [None], rounds=20 if tokens < TOKENS else 1)[0]
            yield measured(f"{name}, {tokens} tokens", took, "us")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--seconds", type=float, default=240.0, help="of a tuning run")
    options = parser.parse_args()
    if options.tune:
        tune(options.seconds)
        return 0
    bytes_per_s = copy_bytes_per_s()
    torch.cuda.empty_cache()
    layers = [new_layer(seed) for seed in range(LAYERS)]
    rows = [row for batch in BATCHES for row in decoding(layers, batch, bytes_per_s)]
    del layers[1:]
    torch.cuda.empty_cache()
    rows += [*small_parts(layers[0]), *products(layers[0]), *training(layers[0])]
    return finish(
        __file__, ("torch", "triton"), rows, save=options.save, machine=gpu_machine(), **gpu()
    )


if __name__ == "__main__":
    sys.exit(main())
