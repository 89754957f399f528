"""Sinks with faults that a comparison of weights has to find."""

from __future__ import annotations

from spmd_rl.weights.plan.layout import Box
from spmd_rl.weights.proof.perturbed_source import flip_lowest_bit
from spmd_rl.weights.tensor_ends import TensorSink


class FlippingSink(TensorSink):
    """Changes a bit of what it received, after the last flush."""

    def digest(self) -> dict[tuple[str, Box], int]:
        for name, piece in self._pieces.named():
            flip_lowest_bit(self._pieces.memory(name, piece.box))
        return super().digest()


class BlindSink(TensorSink):
    """Answers with the digests that it had first."""

    known: dict[tuple[str, Box], int] | None = None

    def digest(self) -> dict[tuple[str, Box], int]:
        self.known = self.known or super().digest()
        return self.known


SINKS = {"": TensorSink, "flip": FlippingSink, "blind": BlindSink, "replicas": TensorSink}
