"""KV memory of an engine: it is given back while the engine sleeps, and returns at one address.

Recorded graphs read and write these addresses, so they stay valid.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_rl.offload.elastic import ElasticMemory
from spmd_rl.offload.host import HostMemory


class KvMemory:
    """One buffer on `device`, allocated once and then unmapped and mapped again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: ElasticMemory | HostMemory | None = None

    @property
    def is_mapped(self) -> bool:
        return self._memory is not None and self._memory.is_mapped

    def allocate(self, num_bytes: int) -> Tensor:
        """Return the buffer as bytes. Raises: ResidencyError if too little memory is left."""
        if self._device.type == "cpu":
            self._memory = HostMemory(num_bytes)
            return self._memory.bytes
        self._memory = ElasticMemory(num_bytes, self._device)
        return self._memory.bytes.zero_()

    def map(self) -> None:
        """Take the memory again. Raises: ResidencyError if too little is left."""
        if self._memory is None or self._memory.is_mapped:
            return
        self._memory.map()
        if self._memory.bytes.is_cuda:
            self._memory.bytes.zero_()

    def unmap(self) -> None:
        if self._memory is not None:
            self._memory.unmap()

    def free(self) -> None:
        """Let go of the buffer; the next `allocate` makes another one."""
        self._memory = None
