"""Hooks at module boundaries, on our network and on those of `transformers`, which share their
module names.

Our queries, keys and values pass through the caller's `attend` object, theirs through an attention
function. Where our projections are joined, their columns pass through the object that stands for
the joint product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from spmd_rl.kernels import PagedAttention, TokenAttention
from spmd_rl.microscope.taps.points import BEFORE, Point
from spmd_rl.model.fused_projections import FusedProjections
from spmd_rl.model.network import CausalLM

See = Callable[[Point, Tensor], Tensor]

_INSIDE = {  # modules whose output is a point, where the network has and calls them
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "o_proj",
    "mlp.gate_proj": "gate_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "down_proj",
}
# where they are one product
_JOINED = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}
# modules whose input is a point
_ENTERED = {"self_attn": "input_norm", "mlp": "post_norm", "mlp.down_proj": "act"}


@contextmanager
def watch(model: CausalLM, see: See) -> Iterator[None]:
    """While it is open, every op of `model` passes `see`."""
    layers = len(model.model.layers)
    score, own = model.logits, vars(model).get("logits")

    def attended(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        if "attend" in kwargs:
            return args, kwargs | {"attend": _watched(kwargs["attend"], see)}
        return (*args[:2], _watched(args[2], see), *args[3:]), kwargs

    with ExitStack() as stack:
        stack.callback(model.register_forward_pre_hook(attended, with_kwargs=True).remove)
        stack.enter_context(watch_modules(model, see))
        _watch_joined(model, see, stack)
        stack.callback(
            partial(setattr, model, "logits", own) if own else partial(delattr, model, "logits")
        )
        model.logits = lambda hidden: see(Point(layers, "logits"), score(hidden))  # type: ignore[method-assign]
        yield


def _watch_joined(model: CausalLM, see: See, stack: ExitStack) -> None:
    for number, layer in enumerate(model.model.layers):
        for name, ops in _JOINED.items():
            module = getattr(layer, name)
            if module.joined is not None:
                stack.callback(setattr, module, "joined", module.joined)
                module.joined = _WatchedProjections(
                    module.joined, see, [Point(number, op) for op in ops]
                )


class _WatchedProjections(FusedProjections):
    """One product for several projections, whose columns are each a point; not where SiLU is part
    of its kernel.
    """

    def __init__(self, joined: FusedProjections, see: See, points: Sequence[Point]) -> None:
        super().__init__(joined.weight, joined.bias, joined.widths)
        self._joined, self._see, self._points = joined, see, points
        self.fuses, self.gated = joined.fuses, joined.gated  # type: ignore[method-assign]

    def product(self, x: Tensor) -> Sequence[Tensor]:
        return [
            self._see(point, one)
            for point, one in zip(self._points, self._joined.product(x), strict=True)
        ]


def _watched(attend: TokenAttention, see: See) -> TokenAttention:
    if isinstance(attend, PagedAttention):
        return _WatchedPages(attend, see)
    return _WatchedAttention(attend, see)


class _WatchedAttention(TokenAttention):
    """Attention whose queries, keys, values and outputs pass `see`."""

    def __init__(self, attend: TokenAttention, see: See) -> None:
        self._attend, self._see = attend, see

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        see = self._see
        q, k, v = see(Point(layer, "q"), q), see(Point(layer, "k"), k), see(Point(layer, "v"), v)
        return see(Point(layer, "attention"), self._attend(layer, q, k, v))


class _WatchedPages(PagedAttention):
    """Attention to a cache, watched; also where keys and values went into it before, with the
    kernel that made them.
    """

    def __init__(self, attend: PagedAttention, see: See) -> None:
        super().__init__(attend.cache, attend.slots, attend.kernel)
        self._attend, self._see = attend, see

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        see = self._see
        q, k, v = see(Point(layer, "q"), q), see(Point(layer, "k"), k), see(Point(layer, "v"), v)
        return see(Point(layer, "attention"), self._attend(layer, q, k, v))

    def read(self, layer: int, q: Tensor) -> Tensor:
        """For caches that FlashAttention reads, whose pages lie one after the other."""
        q = self._see(Point(layer, "q"), q)
        cached = [
            x.flatten(0, 1).index_select(0, self.slots.clamp(min=0))
            for x in self.cache.layers[layer]
        ]
        k, v = (self._see(Point(layer, op), x) for op, x in zip("kv", cached, strict=True))
        if k is not cached[0] or v is not cached[1]:
            self.cache.write(layer, self.slots, k, v)
        return self._see(Point(layer, "attention"), self.kernel(q, *self.cache.layers[layer]))


@contextmanager
def watch_modules(model: Any, see: See) -> Iterator[None]:
    """The points at module boundaries of a decoder with Hugging Face's module names."""
    layers = model.model.layers
    with ExitStack() as stack:
        stack.callback(
            layers[0]
            .register_forward_pre_hook(_entering(see, Point(BEFORE, "embed")), with_kwargs=True)
            .remove
        )
        for number, layer in enumerate(layers):
            modules = dict(layer.named_modules())
            for name, op in _INSIDE.items():
                if modules.get(name) is not None:
                    stack.callback(
                        modules[name].register_forward_hook(_leaving(see, Point(number, op))).remove
                    )
            for name, op in _ENTERED.items():
                hook = _entering(see, Point(number, op))
                stack.callback(
                    modules[name].register_forward_pre_hook(hook, with_kwargs=True).remove
                )
        stack.callback(
            model.model.register_forward_hook(
                _leaving(see, Point(len(layers), "final_norm"))
            ).remove
        )
        yield


def _entering(see: See, point: Point) -> Callable[..., tuple[Any, Any]]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (see(point, args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": see(point, kwargs["hidden_states"])}

    return hook


def _leaving(see: See, point: Point) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, Tensor):
            return see(point, output)
        output.last_hidden_state = see(point, output.last_hidden_state)
        return output

    return hook
