"""GPU memory that no role owns: CUDA's context, and the communicators of NCCL.

Measured on H200s of one host with CUDA 13.0 and NCCL 2.28.9 (results/h200/communicators.json). What
connections between hosts take is read in the source of that NCCL.

Units: bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spmd_rl.offload.ledger import MIB, Entry

CONTEXT_BYTES = 720 * MIB  # the CUDA context, the kernels of a run, and CUDA graphs of decoding
NCCL_BYTES = 170 * MIB
NCCL_KERNEL_BYTES = 250 * MIB  # loaded when the first communicator connects
COMMUNICATOR_BYTES = 196 * MIB  # for each communicator, used or not, on every rank of the world
# One channel of a connection between GPUs of a host, in pages of 2 MiB. It has receive buffers of 4
# MiB (protocol Simple), 0.5 (LL) and 4.7 (LL128), and one page to send. A ring receives from one
# rank; point-to-point operations connect to each peer.
CHANNEL_BYTES = (10 + 2) * MIB
RING_CHANNELS, PEER_CHANNELS = 24, 32
# In a communicator of several hosts, all peers have as many channels as those of other hosts: two
# up to 64 ranks, then one. Peers of other hosts share one buffer of all 32 channels for each
# direction, 16 steps of 128 KiB each. A GPU may send for each other GPU of its host.
# Source: ncclTopoComputeP2pChannels in graph/paths.cc, sharedNetBuffersInit in transport/net.cc
REMOTE_CHANNELS = 2
SHARED_BUFFER_BYTES = 32 * 16 * MIB // 8


@dataclass(frozen=True)
class Peers:
    """The ranks that one rank sends rows to, or receives them from, in one communicator of `ranks`,
    which are all of it.
    """

    ranks: tuple[int, ...]
    num_peers: int

    def num_bytes(self, ranks_per_host: int) -> int:
        """Return what its connections take at most on a GPU."""
        if self.num_peers == 0:
            return 0
        if len({rank // ranks_per_host for rank in self.ranks}) == 1:
            return self.num_peers * PEER_CHANNELS * CHANNEL_BYTES
        num_local = min(self.num_peers, ranks_per_host - 1)
        shared = (ranks_per_host + 1) * SHARED_BUFFER_BYTES
        return num_local * REMOTE_CHANNELS * CHANNEL_BYTES + shared


def gpu_overhead(
    num_communicators: int, num_rings: int, peers: Iterable[Peers], ranks_per_host: int
) -> tuple[Entry, ...]:
    """Return what CUDA and NCCL take of one GPU.

    `num_communicators` counts all of them, and `num_rings` those that connect a ring.
    """
    of_peers = sum(one.num_bytes(ranks_per_host) for one in peers)
    kernels = NCCL_KERNEL_BYTES if num_rings or of_peers else 0
    rings = num_rings * RING_CHANNELS * CHANNEL_BYTES
    nccl = NCCL_BYTES + kernels + num_communicators * COMMUNICATOR_BYTES + rings + of_peers
    return Entry("context", CONTEXT_BYTES), Entry("communicators", nccl)
