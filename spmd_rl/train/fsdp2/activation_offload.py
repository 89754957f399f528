"""ActivationOffload: what layers keep for the backward pass waits in host memory.

In the forward pass a layer's tensors are copied out beside the layers after it. In the backward
pass they come back one layer ahead. The copies have streams of their own.

    forward    layer k computes    |  tensors of layer k - 1 are copied to the host
    backward   layer k computes    |  tensors of layer k - 1 are copied to the GPU

The last layer's tensors stay, as they are needed first. The next micro-batch uses the same host
memory again. On the CPU tensors are copied as well, which tests the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from spmd_rl.kernels import Rotary, TokenAttention
from spmd_rl.train.optimizer.host_stack import HostStack, Reserve

LEAST_BYTES = 1 << 20  # of a tensor that is copied
LEAVING = 2  # layers whose tensors may still be on the GPU while they are copied out
Pair = tuple[Tensor, Tensor]
Forward = Callable[[Tensor, Tensor | None, Rotary, TokenAttention], Pair]


@dataclass(eq=False)
class _Kept:
    """A tensor that a layer keeps: its copy on the host and, in the backward pass, on the GPU."""

    layer: int
    host: Tensor
    on_device: Tensor | None = None


@dataclass
class _Layer:
    """The tensors that a layer keeps by their identity, and those on the GPU until `is_copied`."""

    is_copied: Any
    kept: dict[tuple[object, ...], _Kept] = field(default_factory=dict)
    sources: list[Tensor] = field(default_factory=list)


class ActivationOffload:
    """Wraps the layers of one model. `reserve` returns host memory, which is pinned on a GPU.

    A forward pass with gradients is followed by its backward pass, and then by `finish`, before the
    next begins.
    """

    def __init__(self, device: torch.device, reserve: Reserve) -> None:
        self._device = device
        self._host = HostStack(reserve)
        self._module: Any = torch.get_device_module(device)
        self._to_host, self._to_device = (self._module.Stream() for _ in range(2))
        self._layers: list[_Layer] = []
        self.num_copied_bytes = 0  # to the host, since the beginning

    def wrap(self, layers: Iterable[nn.Module]) -> None:
        """Wrap the layers' forward methods, so that parameters keep their names."""
        for number, module in enumerate(modules := list(layers)):
            wrapped = self._without_last if number == len(modules) - 1 else self._offloading
            module.forward = wrapped(number, module, module.forward)
            self._layers.append(_Layer(self._module.Event()))

    def finish(self) -> None:
        """Free what is left of a forward and backward pass on the GPU."""
        self._module.current_stream().wait_stream(self._to_device)
        self._module.current_stream().wait_stream(self._to_host)
        for layer in self._layers:
            layer.kept.clear()
            layer.sources.clear()
        self._host.clear()

    def _offloading(self, number: int, module: nn.Module, forward: Forward) -> Forward:
        def offloading(
            x: Tensor, residual: Tensor | None, rotary: Rotary, attend: TokenAttention
        ) -> Pair:
            if not torch.is_grad_enabled():
                return forward(x, residual, rotary, attend)
            if number == 0:
                self.finish()  # also after a pass that failed
            self._release(number - LEAVING)
            lasting = {one.untyped_storage().data_ptr() for one in (*module.parameters(), *rotary)}
            with torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: self._pack(number, tensor, lasting), self._unpack
            ):
                out = forward(x, residual, rotary, attend)
            self._layers[number].is_copied.record(self._to_host)
            return out

        return offloading

    def _without_last(self, number: int, module: nn.Module, forward: Forward) -> Forward:
        """Wrap the last layer, which keeps its tensors. Before its backward pass, those of the
        layer before begin to come back.
        """

        def staying(
            x: Tensor, residual: Tensor | None, rotary: Rotary, attend: TokenAttention
        ) -> Pair:
            out = forward(x, residual, rotary, attend)
            if out[0].requires_grad and number > 0:
                self._release(number - LEAVING)
                out[0].register_hook(lambda _: self._bring(number - 1))
            return out

        return staying

    def _pack(self, number: int, tensor: Tensor, lasting: set[int]) -> Tensor | _Kept:
        """Begin to copy a tensor to the host, unless it is small or stays on the GPU anyway."""
        if (
            tensor.device.type != self._device.type
            or tensor.nbytes < LEAST_BYTES
            or not tensor.is_contiguous()
            or tensor.untyped_storage().data_ptr() in lasting
        ):
            return tensor
        layer = self._layers[number]
        # a tensor that several ops keep is copied once
        key = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor._version
        if key not in layer.kept:
            host = self._host.take(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
            layer.kept[key] = _Kept(number, host)
            layer.sources.append(tensor)  # so that its address belongs to no other tensor
            self._to_host.wait_stream(self._module.current_stream())
            with self._module.stream(self._to_host):
                host.copy_(tensor, non_blocking=True)
            self.num_copied_bytes += tensor.nbytes
        return layer.kept[key]

    def _unpack(self, packed: Tensor | _Kept) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        number = packed.layer
        self._bring(number)
        self._module.current_stream().wait_stream(self._to_device)
        if number + 1 < len(self._layers):
            self._layers[number + 1].kept = {}
        tensor = packed.on_device
        assert tensor is not None
        if number > 0:
            self._bring(number - 1)
        return tensor

    def _release(self, number: int) -> None:
        """Free the tensors of a layer on the GPU, once they are copied."""
        if number >= 0 and self._layers[number].sources:
            self._layers[number].is_copied.wait(self._module.current_stream())
            self._layers[number].sources.clear()

    def _bring(self, number: int) -> None:
        """Begin to copy a layer's tensors to the GPU, unless that has begun."""
        self._release(number)
        missing = [one for one in self._layers[number].kept.values() if one.on_device is None]
        for kept in missing:
            kept.on_device = torch.empty_like(kept.host, device=self._device)
        # the host copies are whole, and what used the memory of the new tensors has ended
        self._to_device.wait_stream(self._module.current_stream())
        with self._module.stream(self._to_device):
            for kept in missing:
                assert kept.on_device is not None
                kept.on_device.copy_(kept.host, non_blocking=True)
