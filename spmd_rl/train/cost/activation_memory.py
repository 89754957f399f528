"""Memory that a forward and backward pass takes besides weights and gradients. Pure arithmetic.

It counts what the kernels of a GPU save for the backward pass (`save_for_backward`). What a layer
keeps of a token, it says itself (model/layers). With recompute = all a layer keeps its two inputs
alone, and one layer at a time exists in full in the backward pass. After the layers there are three
vectors of the residual stream: the last norm's input and output, and the rows that are scored.
Units: bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spmd_rl.model.layers.layer import LayerCost, Recompute


@dataclass(frozen=True)
class HeadShape:
    """The sizes of a head: `rows` of logits exist at once, of `scored` tokens in all.

    `keeps_slopes` says that the forward pass keeps the slopes of all logits (kernels/vocab/lm_head)
    instead of computing the logits again. Each of `tp` ranks has a part of the head, and the logits
    of all.
    """

    vocab: int
    hidden: int
    rows: int
    scored: int
    keeps_slopes: bool
    tp: int = 1

    def bytes_in_forward(self, element_bytes: int) -> int:
        """Return the slopes, and two chunks of fp32 logits: a chunk is made before the last is
        freed.
        """
        num_chunks = 2 if self.scored > self.rows else 1
        whole = num_chunks * self._logits() + self._exchanged(element_bytes)
        return self._slopes(element_bytes) + whole

    def weight_bytes(self, element_bytes: int) -> int:
        """Return the gradient of the head's weight, which waits until the backward pass ends."""
        return -(-self.vocab // self.tp) * self.hidden * element_bytes

    def bytes_in_backward(self, element_bytes: int) -> int:
        """Return the peak of the head's backward pass.

        Slopes are multiplied for the weight's gradient. Without them there are a chunk's logits,
        their gradient, that gradient in the compute dtype, and two gradients of the weight.
        """
        weight = self.weight_bytes(element_bytes)
        if self.keeps_slopes:
            return self._slopes(element_bytes) + weight
        rounded = min(self.rows, self.scored) * self.vocab * element_bytes
        return 2 * self._logits() + rounded + 2 * weight + self._exchanged(element_bytes)

    def _exchanged(self, element_bytes: int) -> int:
        """Return what ranks that share the head have of a chunk besides: its logits as parts, and
        this rank's before; or its slopes, of which a rank keeps its own.
        """
        if self.tp == 1:
            return 0
        slopes = min(self.rows, self.scored) * self.vocab * element_bytes
        return max(self._logits() + self._logits() // self.tp, slopes)

    def _slopes(self, element_bytes: int) -> int:
        return self.scored * -(-self.vocab // self.tp) * element_bytes if self.keeps_slopes else 0

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
    blocks: Sequence[LayerCost],
    hidden_size: int,
    head: HeadShape,
    *,
    num_tokens: int,
    element_bytes: int,
    recompute: Recompute,
    num_on_gpu: int | None = None,
) -> Activations:
    """Return the activations of a micro-batch in all blocks of a model.

    Those of `num_on_gpu` blocks are on the GPU at once, and those of all but the last have a place
    in host memory. None: those of all are on the GPU, and none elsewhere.
    """
    token = num_tokens * element_bytes
    kept = [token * one.kept(recompute) for one in blocks]
    in_block = max(
        one.in_backward + (one.kept("none") - one.kept(recompute) if recompute != "none" else 0)
        for one in blocks
    )
    in_head = max(head.bytes_in_forward(element_bytes), head.bytes_in_backward(element_bytes))
    return Activations(
        kept=sum(kept if num_on_gpu is None else sorted(kept, reverse=True)[:num_on_gpu]),
        head=token * 3 * hidden_size + in_head,
        backward=token * in_block + head.weight_bytes(element_bytes),
        host=0 if num_on_gpu is None else sum(kept[:-1]),
    )


def forward_bytes(
    blocks: Sequence[LayerCost],
    hidden_size: int,
    head: HeadShape,
    *,
    num_tokens: int,
    element_bytes: int,
) -> int:
    """Return what a forward pass without gradients takes: one block at a time, then the head."""
    token = num_tokens * element_bytes
    in_block = token * max(one.kept("none") for one in blocks)
    return max(in_block, token * 2 * hidden_size + head.bytes_in_forward(element_bytes))
