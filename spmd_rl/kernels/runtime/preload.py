"""Import of what kernels on NVIDIA GPUs are written in, ahead of their first use."""

from __future__ import annotations

import contextlib

from spmd_rl.kernels.runtime.versions import has_dsl, has_flash


def import_gpu_kernels() -> None:
    """Import Triton, and the CuTe DSL and FlashAttention-4 where they are installed.

    That takes seconds, in which a rank would wait for the controller. It does not touch the GPU.
    """
    # an import that fails is tried again where the kernels are used
    with contextlib.suppress(ImportError):
        from spmd_rl.kernels.linear import gluon, triton_gemm  # noqa: F401

        if has_dsl():
            from spmd_rl.kernels.linear import cute  # noqa: F401
        if has_flash():
            from flash_attn.cute import interface  # noqa: F401

            from spmd_rl.kernels.attention import flash_decode_cute  # noqa: F401
