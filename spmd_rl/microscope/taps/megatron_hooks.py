"""Hooks on Megatron-core's local layer spec on one rank: our points, at modules of its names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from spmd_rl.kernels import PackedAttention
from spmd_rl.microscope.taps.hooks import Observe, hooked_attention, input_hook
from spmd_rl.microscope.taps.points import BEFORE, Point
from spmd_rl.model.families.megatron_layers import INPUT_POINTS, OUTPUT_POINTS
from spmd_rl.train.megatron.attention import LocalNorm
from spmd_rl.train.megatron.backend import Megatron
from spmd_rl.train.megatron.linear import LocalLinear
from spmd_rl.train.megatron.scores import VocabularyHead


@contextmanager
def hook_megatron(backend: Megatron, observe: Observe) -> Iterator[None]:
    """While it is open, every op of the backend's only chunk passes `observe`."""
    schedule = backend.schedule
    (chunk,) = schedule.chunks
    decoder = chunk.module.decoder
    last = len(decoder.layers)
    with ExitStack() as stack:
        embed = input_hook(_of_rows(observe), Point(BEFORE, "embed"))
        stack.callback(decoder.layers[0].register_forward_pre_hook(embed, with_kwargs=True).remove)
        for number, layer in enumerate(decoder.layers):
            _hook_layer(dict(layer.named_modules()), number, observe, stack)
        norm = _output_hook(observe, [Point(last, "final_norm")])
        stack.callback(decoder.final_layernorm.register_forward_hook(norm).remove)
        stack.callback(setattr, backend, "schedule", schedule)
        assert schedule.head is not None
        logits = partial(observe, Point(last, "logits"))
        head = _HookedHead(**vars(schedule.head), observe=logits)
        backend.schedule = replace(schedule, head=head)
        yield


@dataclass(frozen=True)
class _HookedHead(VocabularyHead):
    """The head, whose logits are a point."""

    observe: Callable[[Tensor], Tensor]

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return self.observe(super().logits(hidden, weight))


def _hook_layer(
    modules: dict[str, nn.Module], number: int, observe: Observe, stack: ExitStack
) -> None:
    for name, ops in OUTPUT_POINTS.items():
        output_hook = _output_hook(observe, [Point(number, op) for op in ops])
        stack.callback(modules[name].register_forward_hook(output_hook).remove)
    for name, op in INPUT_POINTS.items():
        hook = input_hook(_of_rows(observe), Point(number, op))
        stack.callback(modules[name].register_forward_pre_hook(hook, with_kwargs=True).remove)
    attention = modules["self_attention.core_attention"]
    attention_hook = _attention_hook(observe)
    stack.callback(attention.register_forward_pre_hook(attention_hook, with_kwargs=True).remove)


def _of_rows(observe: Observe) -> Observe:
    """Return what observes an activation [T, 1, C] as its rows."""
    return lambda point, x: observe(point, x.flatten(0, 1)).view_as(x)


def _output_hook(observe: Observe, points: list[Point]) -> Callable[..., Any]:
    """Return a hook on a norm, or on a layer, whose output may hold several projections."""

    of_rows = _of_rows(observe)

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, Tensor):
            return of_rows(points[0], output)
        if isinstance(module, LocalNorm):  # of a sum, which it returns too
            normed, summed = output
            return of_rows(points[0], normed), summed
        assert isinstance(module, LocalLinear)
        out, bias = output
        parts = zip(points, module.split(out.flatten(0, 1)), strict=True)
        return module.join([observe(point, part) for point, part in parts]).view_as(out), bias

    return hook


def _attention_hook(observe: Observe) -> Callable[..., None]:
    """Return a hook that has a micro-batch's attention observed, from the first layer on."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = kwargs["packed_seq_params"].inputs
        if isinstance(inputs.attend, PackedAttention):
            inputs.attend = hooked_attention(inputs.attend, observe)

    return hook
