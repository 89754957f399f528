"""The ledger: bytes of every tag on one rank, and the phases in which they must be there.

Pure arithmetic over a model's size and a placement; it needs no GPU. A plan that cannot fit is
refused before anything starts, with the sum that shows why.

Units: bytes everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from spmd_rl.errors import PlanError

Phase = Literal["sync", "rollout", "train"]
UNITS = ("KiB", "MiB", "GiB")
THREE_DIGITS = 999.5  # what is less has no more of them before the point, also when it is rounded
PHASES: tuple[Phase, ...] = ("sync", "rollout", "train")

FP32_BYTES = 4
MIB = 1 << 20

# What a GPU holds besides tensors, on an H200 with CUDA 13.0 and NCCL 2.28.9
# (benchmarks/communicators.py).
CONTEXT_BYTES = 720 * MIB  # a context, the kernels that a run loads, and recorded decoding steps
NCCL_BYTES = 170 * MIB
NCCL_KERNEL_BYTES = 250 * MIB  # loaded when the first communicator connects
COMMUNICATOR_BYTES = 196 * MIB  # each, used or not, on every rank of the world
# A channel of a connection between GPUs of a host, in pages of 2 MiB: to receive 4 MiB (protocol
# Simple), 0.5 (LL) and
# 4.7 (LL128) of buffers, and a page to send. A ring receives from one rank; sends and receives
# connect to each peer.
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

    def beside_bytes(self, tag: str) -> int:
        """The most that all else takes in a phase in which `tag` is there; 0 where it never is."""
        there = {phase for entry in self.entries if entry.tag == tag for phase in entry.phases}
        others = Ledger(tuple(entry for entry in self.entries if entry.tag != tag))
        return max(map(others.resident_bytes, there), default=0)

    def sized(self, tag: str, num_bytes: int) -> Ledger:
        """The same with so many bytes under `tag`, where it has that."""
        return Ledger(
            tuple(replace(e, num_bytes=num_bytes) if e.tag == tag else e for e in self.entries)
        )

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
                    f"phase {phase} needs {terms} = {as_size(needed)}, and there are {as_size(capacity_bytes)}"
                )

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger(self.entries + other.entries)


def as_size(num_bytes: int) -> str:
    """Four digits, in the unit that leaves no more than three before the point; more of GiB alone."""
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
    num_gathered: int = 0,
    activations: int = 0,
) -> Ledger:
    """fp32 master weights, gradients and two Adam moments, each cut into `num_shards`; the
    `num_gathered` parameters that are whole at once, where that is not the master itself; and what
    the backward pass keeps."""
    shard = -(-num_parameters // num_shards) * FP32_BYTES
    gathered = num_gathered * compute_bytes if num_shards > 1 or compute_bytes != FP32_BYTES else 0
    return Ledger(
        (
            Entry("master", shard),
            Entry("moments", 2 * shard),
            Entry("grads", shard, ("train",)),
            Entry("gathered", gathered, ("train",)),
            Entry("activations", activations, ("train",)),
        )
    )


def engine_ledger(
    num_parameters: int, weight_bytes: int, kv_bytes: int, *, sleeps: bool = True, step: int = 0
) -> Ledger:
    """One whole replica of the weights, its pages of keys and values, and what a `step` computes.
    One that `sleeps` gives its pages back while the trainer beside it trains; one that never does
    may be at a step in every phase."""
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
    """What CUDA and NCCL take of one GPU: all communicators, those that connect a ring, and how
    many peers there are to send to or receive from, over all of them."""
    kernels = NCCL_KERNEL_BYTES if num_rings or num_peers else 0
    channels = num_rings * RING_CHANNELS + num_peers * PEER_CHANNELS
    nccl = NCCL_BYTES + kernels + num_communicators * COMMUNICATOR_BYTES + channels * CHANNEL_BYTES
    return Ledger((Entry("context", CONTEXT_BYTES), Entry("communicators", nccl)))


def buckets_ledger(bucket_bytes: int) -> Ledger:
    """What a push packs at once, to send and as received."""
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
    """An estimate of what one micro-batch keeps for its backward pass, and its logits.

    A layer keeps its input and the sum within it, their two normed copies, q, k, v and the
    attention's output (`attention_width` elements, twice), gate, up and their product; with cheap
    recomputation what products made; with all of it the input alone. What is recomputed exists in
    full for one layer at a time.
    """
    layer = (
        num_tokens * element_bytes * (4 * hidden_size + 2 * attention_width + 3 * intermediate_size)
    )
    kept = {
        "none": layer,
        "cheap": num_tokens
        * element_bytes
        * (2 * hidden_size + 2 * attention_width + 2 * intermediate_size),
        "all": num_tokens * element_bytes * hidden_size,
    }[recompute]
    again = 0 if recompute == "none" else layer
    return num_layers * kept + again + 2 * logit_bytes + slope_bytes


def kv_token_bytes(num_layers: int, num_kv_heads: int, head_dim: int, element_bytes: int) -> int:
    """Bytes that one token's keys and values take in the whole model."""
    return 2 * num_layers * num_kv_heads * head_dim * element_bytes


def kv_budget(capacity_bytes: int, fraction: float, beside_bytes: int) -> int:
    """What is left for pages of the `fraction` of a GPU that they may take with all beside them;
    below 0 if none is.
    """
    return int(capacity_bytes * fraction) - beside_bytes


def kv_pages(
    token_bytes: int, page_size: int, *, context: int, batch: int, budget_bytes: int | None
) -> int:
    """Pages of an engine that leaves their number open: whole contexts of so many tokens for a full
    batch, as far as its budget goes, but at least one."""
    pages = -(-context // page_size)
    wanted = batch * pages
    affordable = wanted if budget_bytes is None else budget_bytes // (token_bytes * page_size)
    return max(pages, min(wanted, affordable))


def total(ledgers: Iterable[Ledger]) -> Ledger:
    """The ledger of a rank that serves several roles."""
    return sum(ledgers, start=Ledger(()))
