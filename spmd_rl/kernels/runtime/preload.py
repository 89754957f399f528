"""Import of what kernels on NVIDIA GPUs are written in, ahead of their first use."""

from __future__ import annotations

import contextlib

from spmd_rl.kernels.runtime.versions import has_dsl, has_flash, installed


def import_gpu_kernels() -> None:
    """Import the CuTe DSL, FlashAttention-4 and Triton where they are installed.

    That takes seconds, in which a rank would wait for the controller. It does not touch the GPU.
    """
    # what cannot be imported is an error where it is used
    with contextlib.suppress(ImportError):
        import spmd_rl.kernels.linear.gluon
        import spmd_rl.kernels.linear.triton_gemm
    with contextlib.suppress(ImportError):
        if installed("flash-attn-4"):
            from spmd_rl.kernels.runtime.cute_cache import flash_interface

            flash_interface()
        if has_dsl():
            import spmd_rl.kernels.linear.cute
        if has_flash():
            import spmd_rl.kernels.attention.flash_decode_cute
