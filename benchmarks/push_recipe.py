"""Recipe that pushes random weights to a native engine of the same process, for push.py.

spmd-rl run benchmarks.push_recipe --shape 0.6B --folder FOLDER
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import spmd_rl as rl
from spmd_rl.controller.capabilities import WeightProvider, WeightReceiver
from spmd_rl.model.formats import WeightFormat
from spmd_rl.model.read import read_spec

if TYPE_CHECKING:
    from torch import Tensor

    from spmd_rl.rollout.native.engine import NativeEngine

FILE = "pushes.json"
NUM_PUSHES = 42


@dataclass(frozen=True)
class Config:
    shape: str
    folder: str  # with the config.json of this shape
    run: rl.RunConfig = field(default_factory=lambda: rl.RunConfig(verify_every=2))
    split: rl.Split = field(default_factory=rl.Split)


def masters(shape_folder: str, device: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return one buffer of random float32 weights, and each parameter as a part of it."""
    import torch

    shapes = read_spec(shape_folder).parameter_shapes()
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    flat = torch.randn(sum(sizes), device=device)
    parts = zip(shapes.items(), flat.split(sizes), strict=True)
    return flat, {name: part.view(shape) for (name, shape), part in parts}


def engine(
    shape_folder: str, device: Any, num_pages: int = 512, weights: WeightFormat = "full"
) -> NativeEngine:
    """Return an engine with unset weights and little KV memory."""
    import torch

    from spmd_rl.model.formats.coded_tensors import hold_codes
    from spmd_rl.model.network import CausalLM
    from spmd_rl.rollout.native.engine import NativeEngine

    spec = read_spec(shape_folder)
    with torch.device("meta"):
        model = CausalLM(spec).to(torch.bfloat16).requires_grad_(False)
        hold_codes(model, spec, weights)
    model.to_empty(device=device)
    cfg = rl.NativeEngineConfig(dtype="bfloat16", max_batch=8, num_pages=num_pages, weights=weights)
    return NativeEngine(model, cfg, device)


class Masters(rl.Role, WeightProvider):
    """Random float32 weights, in place of a trainer's."""

    def __init__(self, cfg: Config, context: rl.RoleContext) -> None:
        super().__init__(cfg, context)
        _, self.tensors = masters(cfg.folder, context.device)

    def weight_source(self) -> Any:
        from spmd_rl.weights.local_tensors import LocalTensors
        from spmd_rl.weights.tensor_ends import TensorSource

        return TensorSource(LocalTensors.whole(self.tensors).items())

    def call_before_change(self, callback: Callable[[], None]) -> None: ...

    def on_weights_pushed(self, version: int) -> None: ...


class Receiver(rl.Role, WeightReceiver):
    """A native engine that generates nothing."""

    def __init__(self, cfg: Config, context: rl.RoleContext) -> None:
        super().__init__(cfg, context)
        self.engine = engine(cfg.folder, context.device)

    def weight_sink(self) -> Any:
        return self.engine.sink()

    @rl.collective
    def drain(self) -> None:
        """Wait for the GPU."""
        import torch

        if self.context.world.device == "cuda":
            torch.cuda.synchronize()


def main(ctl: rl.Controller, cfg: Config) -> None:
    roles = ctl.world.split(cfg.split)
    source = ctl.spawn(Masters, cfg, on=roles.train)
    receiver = ctl.spawn(Receiver, cfg, on=roles.infer)
    link, stats = ctl.link(source, receiver), []
    for version in range(NUM_PUSHES):
        stats.append(asdict(link.push(version)))
        receiver.drain.call()
    Path(cfg.run.path, FILE).write_text(json.dumps(stats))
