"""Import of what kernels on NVIDIA GPUs are written in, ahead of their first use."""

from __future__ import annotations

import contextlib
from importlib import import_module

from spmd_rl.kernels.runtime.versions import has_dsl, has_flash

TRITON = ("spmd_rl.kernels.linear.triton_gemm", "spmd_rl.kernels.linear.gluon")
CUTE = ("spmd_rl.kernels.linear.cute",)
FLASH = ("flash_attn.cute.interface", "spmd_rl.kernels.attention.flash_decode_cute")


def import_gpu_kernels() -> None:
    """Import Triton, and the CuTe DSL and FlashAttention-4 where they are installed.

    That takes seconds, in which a rank would wait for the controller. It does not touch the GPU.
    """
    for module in (*TRITON, *(CUTE if has_dsl() else ()), *(FLASH if has_flash() else ())):
        with contextlib.suppress(ImportError):  # it is raised again where the module is used
            import_module(module)
