"""Which kernels of attention a model runs, for all that depends on what they can do."""

from __future__ import annotations

import torch

from spmd_rl.errors import ConfigError
from spmd_rl.kernels.attention.backend import AttentionBackend, attention_backend
from spmd_rl.kernels.attention.flash import FLASH_HEAD_DIMS
from spmd_rl.model.spec import ModelSpec


def backend_of(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, split: int = 0
) -> AttentionBackend:
    """Return the kernels of the model's attention, all of whose heads have one size.

    Raises: ConfigError as `attention_backend`.
    """
    return attention_backend(head_size(spec), dtype, device, split, latent_size(spec))


def head_size(spec: ModelSpec) -> int:
    """Return the size of the heads of keys; any that is supported where no layer has keys.

    Raises: ConfigError if layers have heads of several sizes.
    """
    caches = [block.cache() for block in spec.distinct_blocks()]
    sizes = {one.arrays[0][-1] for one in caches if one and one.queries_per_key}
    if len(sizes) > 1:
        raise ConfigError(f"layers with heads of several sizes are not supported: {sorted(sizes)}")
    return next(iter(sizes), FLASH_HEAD_DIMS[0])


def latent_size(spec: ModelSpec) -> int:
    """Return how many elements of a key are its value too; 0 where values are apart."""
    caches = [block.cache() for block in spec.distinct_blocks()]
    return max((one.latent_dim for one in caches if one), default=0)


def fits_cuda_graphs(spec: ModelSpec, backend: AttentionBackend, page_size: int) -> bool:
    """Return whether a decoding step can be recorded, over pages of so many tokens.

    Layers with pages of other arrays cannot. Experts can where attention can: both need bfloat16 on
    Hopper, and then the host does not count an expert's rows.
    """
    caches = [block.cache() for block in spec.distinct_blocks()]
    queries = [0 if one is None else one.queries_per_key for one in caches]
    all_have_keys = all(one is None or one.queries_per_key or not one.arrays for one in caches)
    return all_have_keys and all(backend.fits_cuda_graphs(page_size, one) for one in queries)
