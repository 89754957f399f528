"""Memory that a forward and backward pass takes besides weights and gradients. Pure arithmetic.

It counts what the kernels of a GPU save for the backward pass (`save_for_backward`). Elements of a
token in a layer, with C hidden, F intermediate, W = heads x head size, K = key-value heads x head
size:

    sums of the residual stream     2 C    one before each norm
    outputs of norms                2 C    not with recompute = cheap
    q and k as projected            W + K
    q and k, normed and rotated     W + K  not with cheap
    v, and the attention's output   K + W
    gate and up                     2 F
    their product                   F      not with cheap

With recompute = all a layer keeps its two inputs alone, 2 C, and one layer at a time exists in full
in the backward pass. After the layers there are 3 C: the last norm's input and output, and the rows
that are scored. Units: bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Recompute = Literal["none", "cheap", "all"]


@dataclass(frozen=True)
class LayerShape:
    """The sizes of a decoder layer: of one token, and of all its weights."""

    hidden: int
    intermediate: int
    query_width: int  # heads x head size
    kv_width: int

    def kept_elements(self, recompute: Recompute) -> int:
        """Return the elements that one token keeps in one layer until the backward pass."""
        if recompute == "all":
            return 2 * self.hidden
        matrix_products = 2 * self.query_width + 2 * self.kv_width + 2 * self.intermediate
        cheap = 2 * self.hidden + self.query_width + self.kv_width + self.intermediate
        kept = 2 * self.hidden + matrix_products
        return kept + (cheap if recompute == "none" else 0)

    def gradient_elements(self) -> int:
        """Return the elements of gradients of one token that exist at once in a layer.

        They are those of the product, of gate and up, and of two sums of the residual stream.
        """
        return 3 * self.intermediate + 2 * self.hidden


@dataclass(frozen=True)
class HeadShape:
    """The sizes of a head: `rows` of logits exist at once, of `scored` tokens in all.

    `keeps_slopes` says that the forward pass keeps the slopes of all logits (kernels/vocab/lm_head)
    instead of computing the logits again.
    """

    vocab: int
    hidden: int
    rows: int
    scored: int
    keeps_slopes: bool

    def bytes_in_forward(self, element_bytes: int) -> int:
        """Return the slopes, and two chunks of fp32 logits: a chunk is made before the last is
        freed.
        """
        num_chunks = 2 if self.scored > self.rows else 1
        return self._slopes(element_bytes) + num_chunks * self._logits()

    def weight_bytes(self, element_bytes: int) -> int:
        """Return the gradient of the head's weight, which waits until the backward pass ends."""
        return self.vocab * self.hidden * element_bytes

    def bytes_in_backward(self, element_bytes: int) -> int:
        """Return the peak of the head's backward pass.

        Slopes are multiplied for the weight's gradient. Without them there are a chunk's logits,
        their gradient, that gradient in the compute dtype, and two gradients of the weight.
        """
        weight = self.weight_bytes(element_bytes)
        if self.keeps_slopes:
            return self._slopes(element_bytes) + weight
        rounded = min(self.rows, self.scored) * self.vocab * element_bytes
        return 2 * self._logits() + rounded + 2 * weight

    def _slopes(self, element_bytes: int) -> int:
        return self.scored * self.vocab * element_bytes if self.keeps_slopes else 0

    def _logits(self) -> int:
        return min(self.rows, self.scored) * self.vocab * 4


NO_HEAD = HeadShape(0, 0, 0, 0, False)  # a value head's product is a number for each token


@dataclass(frozen=True)
class Activations:
    """What a micro-batch takes: kept by its layers, and besides, in the head or in a layer's
    backward pass.

    `host` is what layers keep in host memory.
    """

    kept: int
    head: int
    backward: int
    host: int = 0

    @property
    def peak(self) -> int:
        return self.kept + max(self.head, self.backward)


def activations(
    layer: LayerShape,
    head: HeadShape,
    *,
    num_tokens: int,
    num_layers: int,
    element_bytes: int,
    recompute: Recompute,
    num_host_layers: int = 0,
) -> Activations:
    """Return the activations of a micro-batch.

    `num_layers` are those whose activations are on the GPU at once, `num_host_layers` those whose
    activations have a place in host memory.
    """
    token = num_tokens * element_bytes
    kept, after = token * layer.kept_elements(recompute), token * 3 * layer.hidden
    again = 0 if recompute == "none" else token * layer.kept_elements("none") - kept
    in_layer = again + token * layer.gradient_elements()
    in_head = max(head.bytes_in_forward(element_bytes), head.bytes_in_backward(element_bytes))
    return Activations(
        kept=num_layers * kept,
        head=after + in_head,
        backward=in_layer + head.weight_bytes(element_bytes),
        host=num_host_layers * kept,
    )


def forward_bytes(
    layer: LayerShape, head: HeadShape, *, num_tokens: int, element_bytes: int
) -> int:
    """Return what a forward pass without gradients takes: one layer at a time, then the head."""
    in_layer = num_tokens * element_bytes * layer.kept_elements("none")
    hidden = num_tokens * element_bytes * 2 * layer.hidden
    return max(in_layer, hidden + head.bytes_in_forward(element_bytes))
