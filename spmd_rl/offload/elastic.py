"""ElasticMemory: GPU memory that can be given back while its address stays the same.

Physical memory is mapped into reserved addresses, and taken out again. So tensors in it, and CUDA
graphs recorded over them, are valid again after the next mapping. Contents are lost.

Source: torch_memory_saver keeps addresses for graphs in the same way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_rl.offload.vmm import AddressRange


class ElasticMemory:
    """`num_bytes` of one GPU's memory, which is mapped at first.

    Views of `bytes` may be used only while it is mapped. The addresses are freed with the object.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self._range = AddressRange(num_bytes, device)
        self.map()
        self.bytes: Tensor = self._range.bytes

    @property
    def is_mapped(self) -> bool:
        return self._range.is_mapped

    def map(self) -> None:
        """Map physical memory with undefined content to the addresses.

        Raises: ResidencyError when the GPU has too little left.
        """
        if not self.is_mapped:
            self._range.map(self._range.create())

    def unmap(self) -> None:
        """Give the memory back. Blocks: until the GPU has finished its queued work."""
        self._range.unmap()
