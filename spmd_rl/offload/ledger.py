"""Ledger of memory: the bytes of every tag on one rank, and the phases in which they are resident.

It is computed from a model's size and a placement, without a GPU. A plan that cannot fit is refused
before anything starts, with the sum that shows why.

Units: bytes everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from spmd_rl.errors import PlanError

Phase = Literal["sync", "rollout", "train"]
UNITS = ("KiB", "MiB", "GiB")
THREE_DIGITS = 999.5  # below it, a number rounds to at most three digits before the point
PHASES: tuple[Phase, ...] = ("sync", "rollout", "train")

FP32_BYTES = 4
MIB = 1 << 20

# Memory of a GPU besides tensors, on an H200 with CUDA 13.0 and NCCL 2.28.9, measured by
# benchmarks/communicators.py.
CONTEXT_BYTES = 720 * MIB  # the CUDA context, the kernels of a run, and CUDA graphs of decoding
NCCL_BYTES = 170 * MIB
NCCL_KERNEL_BYTES = 250 * MIB  # loaded when the first communicator connects
COMMUNICATOR_BYTES = 196 * MIB  # for each communicator, used or not, on every rank of the world
# One channel of a connection between GPUs of a host, in pages of 2 MiB. It has receive buffers of 4
# MiB (protocol Simple), 0.5 (LL) and 4.7 (LL128), and one page to send. A ring receives from one
# rank; point-to-point operations connect to each peer.
CHANNEL_BYTES = (10 + 2) * MIB
RING_CHANNELS, PEER_CHANNELS = 24, 32


@dataclass(frozen=True)
class Entry:
    """Bytes under one tag, resident in the given phases."""

    tag: str
    num_bytes: int
    phases: tuple[Phase, ...] = PHASES


@dataclass(frozen=True)
class Ledger:
    """All entries of one rank."""

    entries: tuple[Entry, ...]

    def resident_bytes(self, phase: Phase) -> int:
        return sum(entry.num_bytes for entry in self.entries if phase in entry.phases)

    def peak_bytes(self) -> int:
        return max((self.resident_bytes(phase) for phase in PHASES), default=0)

    def only_in(self, phase: Phase) -> int:
        """Return the bytes that are resident in this phase and in no other."""
        return sum(entry.num_bytes for entry in self.entries if entry.phases == (phase,))

    def beside_bytes(self, tag: str) -> int:
        """Return the most that other tags take in a phase where `tag` is resident, or 0."""
        phases = {phase for entry in self.entries if entry.tag == tag for phase in entry.phases}
        rest = Ledger(tuple(entry for entry in self.entries if entry.tag != tag))
        return max(map(rest.resident_bytes, phases), default=0)

    def sized(self, tag: str, num_bytes: int) -> Ledger:
        """Return a copy with `num_bytes` in each entry under `tag`."""
        entries = [
            replace(entry, num_bytes=num_bytes) if entry.tag == tag else entry
            for entry in self.entries
        ]
        return Ledger(tuple(entries))

    def require(self, capacity_bytes: int) -> None:
        """Raises: PlanError with the arithmetic, if any phase needs more than `capacity_bytes`."""
        for phase in PHASES:
            needed = self.resident_bytes(phase)
            if needed > capacity_bytes:
                counted = [
                    entry for entry in self.entries if phase in entry.phases and entry.num_bytes
                ]
                terms = " + ".join(f"{entry.tag} {as_size(entry.num_bytes)}" for entry in counted)
                raise PlanError(
                    f"phase {phase} needs {terms} = {as_size(needed)}, "
                    f"and there are {as_size(capacity_bytes)}"
                )

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger(self.entries + other.entries)


def as_size(num_bytes: int) -> str:
    """Format bytes with four digits, at most three of them before the point unless in GiB."""
    number, unit = float(num_bytes), "B"
    for larger in UNITS:
        if number < THREE_DIGITS:
            break
        number, unit = number / 1024, larger
    if unit == "B" or number >= THREE_DIGITS:
        return f"{number:,.0f} {unit}"
    return f"{number:#.4g} {unit}"


def trainer_ledger(
    num_parameters: int,
    num_shards: int,
    compute_bytes: int,
    *,
    num_trained: int,
    moments: int,
    num_gathered: int = 0,
    activations: int = 0,
) -> Ledger:
    """Return the ledger of a trainer: fp32 master weights and gradients in `num_shards` shards
    each; `moments`, the optimizer's bytes; gathered parameters; and what the backward pass keeps.

    `num_trained` parameters have gradients. `num_gathered` is the number of parameters that are
    gathered at once. They take no memory where the gathered tensor is the master itself.
    """
    shard, gradients = (
        -(-number // num_shards) * FP32_BYTES for number in (num_parameters, num_trained)
    )
    gathered = num_gathered * compute_bytes if num_shards > 1 or compute_bytes != FP32_BYTES else 0
    return Ledger(
        (
            Entry("master", shard),
            Entry("moments", moments),
            Entry("grads", gradients, ("train",)),
            Entry("gathered", gathered, ("train",)),
            Entry("activations", activations, ("train",)),
        )
    )


def frozen_ledger(
    num_parameters: int,
    num_shards: int,
    element_bytes: int,
    *,
    num_gathered: int = 0,
    activations: int = 0,
) -> Ledger:
    """Return the ledger of a model that never learns: its weights in `num_shards` shards, and what
    a forward pass takes.
    """
    return Ledger(
        (
            Entry("weights", -(-num_parameters // num_shards) * element_bytes),
            Entry("gathered", num_gathered * element_bytes, ("train",)),
            Entry("activations", activations, ("train",)),
        )
    )


def engine_ledger(
    num_parameters: int, weight_bytes: int, kv_bytes: int, *, sleeps: bool = True, step: int = 0
) -> Ledger:
    """Return the ledger of an engine: one replica of the weights, the pages of keys and values, and
    `step`, the temporary memory of one step.

    An engine that `sleeps` gives its pages back in the train phase. An engine that does not may run
    a step in every phase.
    """
    awake: tuple[Phase, ...] = ("sync", "rollout") if sleeps else PHASES
    computing: tuple[Phase, ...] = ("rollout",) if sleeps else PHASES
    return Ledger(
        (
            Entry("weights", num_parameters * weight_bytes),
            Entry("kv", kv_bytes, awake),
            Entry("step", step, computing),
        )
    )


def device_ledger(num_communicators: int, num_rings: int, num_peers: int) -> Ledger:
    """Return what CUDA and NCCL take of one GPU.

    `num_communicators` counts all of them, `num_rings` those that connect a ring, and `num_peers`
    the peers of point-to-point operations over all communicators.
    """
    kernels = NCCL_KERNEL_BYTES if num_rings or num_peers else 0
    channels = num_rings * RING_CHANNELS + num_peers * PEER_CHANNELS
    nccl = NCCL_BYTES + kernels + num_communicators * COMMUNICATOR_BYTES + channels * CHANNEL_BYTES
    return Ledger((Entry("context", CONTEXT_BYTES), Entry("communicators", nccl)))


def buckets_ledger(bucket_bytes: int) -> Ledger:
    """Return the ledger of the buckets that a push packs at once, to send and to receive."""
    return Ledger((Entry("buckets", bucket_bytes, ("sync",)),))


def activation_bytes(
    *,
    num_tokens: int,
    num_layers: int,
    hidden_size: int,
    intermediate_size: int,
    attention_width: int,
    logit_bytes: int,
    slope_bytes: int,
    element_bytes: int,
    recompute: Literal["none", "cheap", "all"],
) -> int:
    """Estimate the bytes that one micro-batch keeps for its backward pass, with its logits.

    Without recomputation, a layer keeps its input and the sum within it, their two normed copies,
    q, k, v and the attention's output (`attention_width` elements, twice), gate, up and their
    product. With "cheap" recomputation it keeps the results of matrix products; with "all" its
    input and the sum before it alone. What is recomputed exists in full for one layer at a time.
    """
    layer = (
        num_tokens * element_bytes * (4 * hidden_size + 2 * attention_width + 3 * intermediate_size)
    )
    kept_bytes = {
        "none": layer,
        "cheap": num_tokens
        * element_bytes
        * (2 * hidden_size + 2 * attention_width + 2 * intermediate_size),
        "all": num_tokens * element_bytes * 2 * hidden_size,
    }[recompute]
    recomputed_bytes = 0 if recompute == "none" else layer
    return num_layers * kept_bytes + recomputed_bytes + 2 * logit_bytes + slope_bytes


def kv_token_bytes(num_layers: int, num_kv_heads: int, head_dim: int, element_bytes: int) -> int:
    """Return the bytes of one token's keys and values in the whole model."""
    return 2 * num_layers * num_kv_heads * head_dim * element_bytes


def kv_budget(capacity_bytes: int, fraction: float, beside_bytes: int) -> int:
    """Return the bytes left for pages, of the `fraction` of a GPU that a run may use.

    The result is below 0 where other memory (`beside_bytes`) takes more than that.
    """
    return int(capacity_bytes * fraction) - beside_bytes


def kv_pages(
    token_bytes: int, page_size: int, *, context: int, batch: int, budget_bytes: int | None
) -> int:
    """Return the number of pages for an engine whose config does not set it.

    It suffices for a full batch of whole contexts of `context` tokens if the budget allows that,
    and for one whole context in any case.
    """
    context_pages = -(-context // page_size)
    num_wanted = batch * context_pages
    affordable = num_wanted if budget_bytes is None else budget_bytes // (token_bytes * page_size)
    return max(context_pages, min(num_wanted, affordable))


def total(ledgers: Iterable[Ledger]) -> Ledger:
    """Return the ledger of a rank that serves several roles."""
    return sum(ledgers, start=Ledger(()))
