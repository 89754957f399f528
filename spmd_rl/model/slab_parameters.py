"""Parameters of a model in one slab of memory, so that they can sleep and wake as one."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

ALIGN_BYTES = 512  # as torch's allocator aligns


def fill_slab(model: nn.Module, allocate: Callable[[int], Tensor]) -> None:
    """Give the parameters of a model on the meta device memory in one slab; its content is unset.

    `allocate` returns that many bytes, uint8. Parameters on a device keep their memory. Those that
    are parts of one tensor, such as packed projections, stay next to each other.
    """
    starts: dict[int, int] = {}
    num_bytes = 0
    for parameter in filter(_is_meta, model.parameters()):
        storage = parameter.untyped_storage()
        if storage._cdata not in starts:
            starts[storage._cdata] = num_bytes
            num_bytes += -(-storage.nbytes() // ALIGN_BYTES) * ALIGN_BYTES
    slab = allocate(num_bytes)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not _is_meta(parameter):
                continue
            start = starts[parameter.untyped_storage()._cdata]
            memory = slab[start : start + parameter.untyped_storage().nbytes()]
            whole = memory.view(parameter.dtype)
            # as_strided counts its offset from the begin of the slab
            offset = whole.storage_offset() + parameter.storage_offset()
            part = whole.as_strided(parameter.shape, parameter.stride(), offset)
            setattr(module, name, nn.Parameter(part, requires_grad=parameter.requires_grad))


def _is_meta(parameter: Tensor) -> bool:
    return parameter.is_meta
