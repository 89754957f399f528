"""Least time of a decode step of an engine on GPUs, from bytes, operations and sums. Pure.

A rank reads its weights once for all sequences of its engine, and their keys and values. Of the
experts it reads those that any row takes, if all are equally likely. Where ranks share matrices,
they add parts twice in a layer. Real steps take longer: these are floors.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from spmd_rl.model.formats.coded_weights import coded_sizes
from spmd_rl.model.spec import EMBEDDING, ModelSpec
from spmd_rl.rollout.kinds import EngineConfig, kind_of
from spmd_rl.rollout.memory import expert_elements, item_bytes, sequence_kv_bytes, weight_bytes

SUMS_PER_LAYER = 2  # after attention, and after the MLP
ROUNDED_BYTES = 2  # of an element of a sum, in bfloat16
# Seconds of an all-reduce in which each rank reads the parts of all others, by the bytes of a part.
# NVLink of H100s, without multicast; by SGLang's pull request 2904, not measured here.
PART_BYTES = (4 << 10, 32 << 10, 256 << 10, 512 << 10, 1 << 20)
ONE_SHOT_S = {
    2: (3.9e-6, 4.5e-6, 7.9e-6, 12.5e-6, 19.9e-6),
    4: (3.7e-6, 4.8e-6, 13.9e-6, 20.2e-6, 31.1e-6),
    8: (5.7e-6, 7.8e-6, 16.7e-6, 22.1e-6, 33.8e-6),
}
LINK_BYTES_PER_S = 3.4e11  # NCCL's send and receive: results/h200/push_across_gpus.json


@dataclass(frozen=True)
class Gpu:
    """What a GPU reads of its memory, and computes in bfloat16, in a second."""

    name: str
    bytes_per_s: float
    flops_per_s: float


# Bytes are those that a copy reads and writes (results/h200/attention_decode.json). An H100's are
# not measured: the same share, 0.885, of its data sheet's 3.35e12. Operations are those of a large
# product on an H200 (benchmarks/shapes.py). An H100 has the same processors.
H200 = Gpu("H200", 4.25e12, 7.88e14)
H100 = Gpu("H100", 2.95e12, 7.88e14)
H100_BYTES = 80 << 30


def gpu_of(num_bytes: int) -> Gpu:
    """Return the GPU whose rates are taken for one with so much memory."""
    return H100 if num_bytes <= H100_BYTES else H200


@dataclass(frozen=True)
class StepTime:
    """Seconds of a decode step, by what they are for.

    `arithmetic_s` is what operations take beyond the time of reading.
    """

    weights_s: float
    kv_s: float
    arithmetic_s: float
    sums_s: float

    @property
    def seconds(self) -> float:
        return sum(getattr(self, one.name) for one in fields(self))


@dataclass(frozen=True)
class DecodeWork:
    """What a rank of an engine does in a decode step.

    It reads `shared_bytes` whatever the rows, `kv_bytes` for each key of a row, and the touched
    share of `expert_bytes`. A row takes `taken` of all experts, and `flops`, and `key_flops` for
    each key. `tp` ranks add parts of `sum_elements` of a row, `num_sums` times, of `part_bytes`
    an element. The rows of `ep` ranks come to the experts of each.
    """

    shared_bytes: int
    expert_bytes: float
    taken: float
    kv_bytes: int
    flops: float
    key_flops: int
    num_sums: int
    sum_elements: int
    part_bytes: int
    tp: int
    ep: int

    def time(self, gpu: Gpu, num_rows: int, num_keys: float) -> StepTime:
        """Return the time of a step of `num_rows` sequences that have `num_keys` keys each."""
        touched = 1 - (1 - self.taken) ** (num_rows * self.ep)
        weights = (self.shared_bytes + self.expert_bytes * touched) / gpu.bytes_per_s
        kv = num_rows * num_keys * self.kv_bytes / gpu.bytes_per_s
        computing = num_rows * (self.flops + num_keys * self.key_flops) / gpu.flops_per_s
        one_sum = all_reduce_s(num_rows * self.sum_elements, self.part_bytes, self.tp)
        return StepTime(weights, kv, max(0.0, computing - weights - kv), self.num_sums * one_sum)


def decode_work(spec: ModelSpec, cfg: EngineConfig, tp: int, ep: int) -> DecodeWork:
    """Return the work of a rank of an engine whose `tp` ranks share matrices, or `ep` experts.

    A native engine adds parts in float32, SGLang in bfloat16.
    """
    blocks = [block.cost(tp) for block in spec.blocks]
    experts = expert_elements(spec)
    num_coded, coded_bytes = coded_sizes(spec, cfg.weights, ep, experts_alone=True)
    expert_bytes = (experts / (tp * ep) - num_coded) * item_bytes(cfg) + coded_bytes
    head = spec.vocab_size * spec.hidden_size / tp
    return DecodeWork(
        shared_bytes=int(_read_bytes(spec, cfg, tp, ep) - expert_bytes),
        expert_bytes=expert_bytes,
        taken=1 - sum(one.idle for one in blocks) / experts if experts else 0.0,
        kv_bytes=sequence_kv_bytes(spec, cfg, cfg.page_tokens, tp) // cfg.page_tokens,
        flops=2 * (sum(one.multiplied for one in blocks) + head),
        key_flops=sum(one.flops_per_key for one in blocks),
        num_sums=SUMS_PER_LAYER * spec.num_layers,
        sum_elements=spec.hidden_size,
        part_bytes=4 if cfg.promises_bits else ROUNDED_BYTES,
        tp=tp,
        ep=ep,
    )


def all_reduce_s(num_elements: int, part_bytes: int, tp: int) -> float:
    """Return the least time in which `tp` ranks add `num_elements` elements.

    Each reads the parts of all. Or each adds its share of the elements, and then all gather the
    rounded sums: that has two latencies, and moves fewer bytes.
    """
    if tp == 1:
        return 0.0
    moved = num_elements * (part_bytes + ROUNDED_BYTES) * (tp - 1) / tp
    in_two = 2 * ONE_SHOT_S[tp][0] + moved / LINK_BYTES_PER_S
    size = num_elements * part_bytes
    return in_two if size > PART_BYTES[-1] else min(in_two, one_shot_s(size, tp))


def one_shot_s(size: int, tp: int) -> float:
    """Return the time in which each of `tp` ranks reads the parts of all: `size` bytes, at most
    1 MiB. Between the sizes of the table it rises evenly.
    """
    return float(np.interp(size, PART_BYTES, ONE_SHOT_S[tp]))


def _read_bytes(spec: ModelSpec, cfg: EngineConfig, tp: int, ep: int) -> int:
    """Return the bytes of a rank's weights without the embedding, of which a step reads few rows.

    An embedding that is the head too is read: a rank's share of it.
    """
    held = spec.vocab_size * spec.hidden_size
    if tp > 1:
        held = kind_of(cfg).boxes(spec, 0, tp)[EMBEDDING].num_elements
    read = spec.vocab_size * spec.hidden_size // tp if spec.tie_embeddings else 0
    return weight_bytes(spec, cfg, tp, ep) - (held - read) * item_bytes(cfg)
