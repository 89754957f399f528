"""Import of what kernels on NVIDIA GPUs are written in, ahead of their first use."""

from __future__ import annotations

import contextlib
import os

from spmd_rl.kernels.runtime.disk_cache import user_cache
from spmd_rl.kernels.runtime.versions import has_dsl, has_flash

TRITON_CACHE_ENV = "TRITON_CACHE_DIR"


def import_gpu_kernels() -> None:
    """Import Triton, and the CuTe DSL and FlashAttention-4 where they are installed.

    That takes seconds, in which a rank would wait for the controller. It does not touch the GPU.
    """
    keep_triton_cache_private()
    # an import that fails is tried again where the kernels are used
    with contextlib.suppress(ImportError):
        from spmd_rl.kernels.linear import gluon, triton_gemm  # noqa: F401

        if has_dsl():
            from spmd_rl.kernels.linear import cute  # noqa: F401
        if has_flash():
            from flash_attn.cute import interface  # noqa: F401

            from spmd_rl.kernels.attention import flash_decode_cute  # noqa: F401


def keep_triton_cache_private() -> None:
    """Have Triton keep its machine code in our cache's folder, unless TRITON_CACHE_DIR is set.

    Triton does not check who wrote what it loads. Only this user can enter our folder.
    """
    cache = user_cache()
    folder = cache.private_folder("triton") if cache else None
    if folder is not None:
        os.environ.setdefault(TRITON_CACHE_ENV, str(folder))
