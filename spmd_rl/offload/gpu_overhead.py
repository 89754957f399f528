"""GPU memory that no role owns: CUDA's context, and the communicators of NCCL.

Measured on an H200 with CUDA 13.0 and NCCL 2.28.9 (results/h200/communicators.json).

Units: bytes.
"""

from __future__ import annotations

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


def gpu_overhead(num_communicators: int, num_rings: int, num_peers: int) -> tuple[Entry, ...]:
    """Return what CUDA and NCCL take of one GPU.

    `num_communicators` counts all of them, `num_rings` those that connect a ring, and `num_peers`
    the peers of point-to-point operations over all communicators.
    """
    kernels = NCCL_KERNEL_BYTES if num_rings or num_peers else 0
    channels = num_rings * RING_CHANNELS + num_peers * PEER_CHANNELS
    nccl = NCCL_BYTES + kernels + num_communicators * COMMUNICATOR_BYTES + channels * CHANNEL_BYTES
    return Entry("context", CONTEXT_BYTES), Entry("communicators", nccl)
