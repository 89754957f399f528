"""The gated delta layer's operations, on the device at hand."""

from __future__ import annotations

from torch import Tensor

from spmd_rl.kernels.delta.rule import (
    DeltaHeads,
    DeltaStates,
    DeltaWeights,
    gated_delta,
    plain_gated_norm,
)
from spmd_rl.kernels.delta.states import SequenceStates


def gated_delta_pass(
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    weights: DeltaWeights,
    heads: DeltaHeads,
    states: SequenceStates,
) -> Tensor:
    """Mix the new tokens of sequences, from the states before them to those after them.

    On NVIDIA GPUs it is a kernel, without gradients of states. Shape: as
    `rule.gated_delta`.
    """
    if qkv.is_cuda:
        from spmd_rl.kernels.delta.on_gpu import gated_delta_on_gpu

        return gated_delta_on_gpu(qkv, b, a, weights, heads, states)
    conv, kept = states.begin(0), states.begin(1)
    begin = None if conv is None or kept is None else DeltaStates(conv, kept)
    out, after = gated_delta(qkv, b, a, weights, heads, states.lengths, begin)
    for number, state in enumerate(after):
        states.end(number, state)
    return out


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rule.plain_gated_norm`, on NVIDIA GPUs in one kernel."""
    if x.is_cuda:
        from spmd_rl.kernels.delta.on_gpu import gated_norm_on_gpu

        return gated_norm_on_gpu(x, gate, weight, eps)
    return plain_gated_norm(x, gate, weight, eps)
