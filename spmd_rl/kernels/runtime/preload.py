"""Import of what kernels on NVIDIA GPUs are written in, ahead of their first use."""

from __future__ import annotations

import contextlib
import os

from spmd_rl.kernels.runtime.cuda_kernels import has_cupy
from spmd_rl.kernels.runtime.disk_cache import user_cache
from spmd_rl.kernels.runtime.versions import has_dsl, has_flash

CACHES = {"triton": "TRITON_CACHE_DIR", "cupy": "CUPY_CACHE_DIR"}


def import_gpu_kernels() -> None:
    """Import Triton, and CuPy, the CuTe DSL and FlashAttention-4 where they are installed.

    That takes seconds, in which a rank would wait for the controller. It does not touch the GPU.
    """
    keep_caches_private()
    # an import that fails is tried again where the kernels are used
    with contextlib.suppress(ImportError):
        from spmd_rl.kernels.linear import gluon, triton_gemm  # noqa: F401

        if has_cupy():
            import cupy  # noqa: F401
        if has_dsl():
            from spmd_rl.kernels.linear import cute  # noqa: F401
        if has_flash():
            from flash_attn.cute import interface  # noqa: F401

            from spmd_rl.kernels.attention import flash_decode_cute  # noqa: F401


def keep_caches_private() -> None:
    """Have Triton and CuPy keep their machine code in our cache, unless a variable says where.

    They do not check who wrote what they load. Only this user can enter our folder.
    """
    cache = user_cache()
    for name, variable in CACHES.items():
        folder = cache.private_folder(name) if cache else None
        if folder is not None:
            os.environ.setdefault(variable, str(folder))
