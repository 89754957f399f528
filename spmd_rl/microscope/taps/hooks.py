"""Hooks at module boundaries, on our network and on `transformers` models with the same names.

Our queries, keys and values pass through the caller's `attend` object, those of `transformers`
through an attention function. If our projections are joined, their columns pass through the object
that stands for the joint product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from spmd_rl.kernels import PagedAttention, TokenAttention
from spmd_rl.kernels.attention.token_attention import WHOLE, Reach, attend
from spmd_rl.kernels.delta.states import SequenceStates
from spmd_rl.microscope.taps.points import BEFORE, Point, know_points
from spmd_rl.model.fused_projections import FusedProjections
from spmd_rl.model.layers.block import BlockSpec
from spmd_rl.model.network import CausalLM
from spmd_rl.model.spec import ModelSpec

Observe = Callable[[Point, Tensor], Tensor]


@contextmanager
def hook_model(model: CausalLM, observe: Observe) -> Iterator[None]:
    """While it is open, every op of `model` passes `observe`."""
    num_layers = len(model.model.layers)
    know_points(model.spec.blocks)
    logits, own_logits = model.logits, vars(model).get("logits")

    def restore_logits() -> None:
        if own_logits:
            model.logits = own_logits  # type: ignore[method-assign]
        else:
            del model.logits

    with ExitStack() as stack:
        attention = _attention_hook(observe)
        stack.callback(model.register_forward_pre_hook(attention, with_kwargs=True).remove)
        stack.enter_context(hook_modules(model, model.spec, observe))
        _hook_joint_projections(model, observe, stack)
        stack.callback(restore_logits)
        model.logits = lambda hidden: observe(Point(num_layers, "logits"), logits(hidden))  # type: ignore[method-assign]
        yield


def _attention_hook(observe: Observe) -> Callable[..., tuple[Any, Any]]:
    """Return a hook that replaces the model's argument `attend` by one that observes it."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if "attend" in kwargs:
            return args, kwargs | {"attend": hooked_attention(kwargs["attend"], observe)}
        return (*args[:2], hooked_attention(args[2], observe), *args[3:]), kwargs

    return hook


def _hook_joint_projections(model: CausalLM, observe: Observe, stack: ExitStack) -> None:
    for number, (layer, block) in enumerate(
        zip(model.model.layers, model.spec.blocks, strict=True)
    ):
        for one in block.layers:
            module, points = getattr(layer, one.name), one.points()
            if getattr(module, "joined", None) is not None:
                stack.callback(setattr, module, "joined", module.joined)
                module.joined = _HookedProjections(
                    module.joined,
                    observe,
                    [Point(number, each.op) for each in points if each.fused],
                )


class _HookedProjections(FusedProjections):
    """One product for several projections, whose columns are a point each.

    They are no points if SiLU is part of the kernel.
    """

    def __init__(self, joined: FusedProjections, observe: Observe, points: Sequence[Point]) -> None:
        super().__init__(joined.weight, joined.bias, joined.widths)
        self._joined, self._observe, self._points = joined, observe, points
        self.fuses, self.gated = joined.fuses, joined.gated  # type: ignore[method-assign]

    def product(self, x: Tensor) -> Sequence[Tensor]:
        return [
            self._observe(point, columns)
            for point, columns in zip(self._points, self._joined.product(x), strict=True)
        ]


def hooked_attention(attend: TokenAttention, observe: Observe) -> TokenAttention:
    """Return `attend` with hooks on its queries, keys, values and outputs."""
    if isinstance(attend, PagedAttention):
        return _HookedPagedAttention(attend, observe)
    return _HookedAttention(attend, observe)


class _HookedAttention(TokenAttention):
    """Attention with hooks on its queries, keys, values and outputs."""

    def __init__(self, attend: TokenAttention, observe: Observe) -> None:
        self._attend, self._observe = attend, observe

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, reach: Reach = WHOLE
    ) -> Tensor:
        return _attend_observed(self._attend, self._observe, layer, (q, k, v), reach)

    def history(self, layer: int, *rows: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
        return self._attend.history(layer, *rows)

    def sequences(self, layer: int) -> Iterator[tuple[slice | Tensor, SequenceStates]]:
        return self._attend.sequences(layer)


def _attend_observed(
    inner: TokenAttention, observe: Observe, layer: int, rows: Sequence[Tensor], reach: Reach
) -> Tensor:
    q, k, v = (observe(Point(layer, op), x) for op, x in zip("qkv", rows, strict=True))
    return observe(Point(layer, "attention"), inner(layer, q, k, v, reach=reach))


class _HookedPagedAttention(PagedAttention):
    """Attention over a cache, with hooks.

    The kernel that makes keys and values may put them into the cache before attention is called.
    """

    def __init__(self, attend: PagedAttention, observe: Observe) -> None:
        super().__init__(attend.cache, attend.slots, attend.kernel, attend.tables, attend.states)
        self._attend, self._observe = attend, observe

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, reach: Reach = WHOLE
    ) -> Tensor:
        return _attend_observed(self._attend, self._observe, layer, (q, k, v), reach)

    def read(self, layer: int, q: Tensor, reach: Reach) -> Tensor:
        """For caches that FlashAttention reads, whose pages lie one after the other."""
        q = self._observe(Point(layer, "q"), q)
        cached = self._read_slots(layer)
        k, v = (self._observe(Point(layer, op), x) for op, x in zip("kv", cached, strict=True))
        if k is not cached[0] or v is not cached[1]:
            self.cache.write(layer, self.slots, k, v)
        out = attend(self.kernel, q, *self.cache.keys_of(layer), reach)
        return self._observe(Point(layer, "attention"), out)

    def _read_slots(self, layer: int) -> list[Tensor]:
        """Return the keys and the values in the slots of the batch."""
        slots = self.slots.clamp(min=0)
        return [x.flatten(0, 1).index_select(0, slots) for x in self.cache.keys_of(layer)]


@contextmanager
def hook_modules(model: Any, spec: ModelSpec, observe: Observe) -> Iterator[None]:
    """Hook the points at module boundaries of a decoder with Hugging Face's module names."""
    layers = model.model.layers
    with ExitStack() as stack:
        embed = input_hook(observe, Point(BEFORE, "embed"))
        stack.callback(layers[0].register_forward_pre_hook(embed, with_kwargs=True).remove)
        for number, layer in enumerate(layers):
            _hook_layer(layer, spec.blocks[number], number, observe, stack)
        final_norm = _output_hook(observe, Point(len(layers), "final_norm"))
        stack.callback(model.model.register_forward_hook(final_norm).remove)
        yield


def _hook_layer(
    layer: nn.Module, block: BlockSpec, number: int, observe: Observe, stack: ExitStack
) -> None:
    """Hook the points of a block at its modules. Some networks lack modules whose output is one."""
    modules = dict(layer.named_modules())
    for one in block.points():
        point = Point(number, one.op)
        if (module := modules.get(one.output_of) if one.output_of else None) is not None:
            stack.callback(module.register_forward_hook(_output_hook(observe, point)).remove)
        if one.input_of:
            hook = input_hook(observe, point)
            module = modules[one.input_of]
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)


def input_hook(observe: Observe, point: Point) -> Callable[..., tuple[Any, Any]]:
    """Return a hook that observes the hidden states that a module is given."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (observe(point, args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": observe(point, kwargs["hidden_states"])}

    return hook


def _output_hook(observe: Observe, point: Point) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, Tensor):
            return observe(point, output)
        output.last_hidden_state = observe(point, output.last_hidden_state)
        return output

    return hook
