"""Names of GPU kernels, and what they say of tile, split and instruction."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from spmd_rl.kernels.linear.tiles import WGMMA_ROWS

FLASH = "FlashAttention-4"
FLASH_COMBINE = f"{FLASH} combine"  # its own kernel that merges splits
MAX_NAME = 96
_OURS = re.compile(
    r"(?P<kind>_|_ring_|shared_)matmul_(?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+)"
    r"(x(?P<stages>\d+))?(?P<swapped>_swap|_x_first)?"
)
_FUNCTORS = re.compile(r"CUDAFunctor_(\w+)|(\w+)Functor<|(\w+?)_kernel_(?:cuda|impl)")


@dataclass(frozen=True)
class KernelInfo:
    """Facts about a kernel, empty if unknown. `splits` are those of K, or of the keys."""

    name: str
    tile: str = ""
    splits: str = ""
    instruction: str = ""

    def __str__(self) -> str:
        facts = ", ".join(part for part in (self.tile, self.splits, self.instruction) if part)
        return f"{self.name} ({facts})" if facts else self.name


def identify(name: str, hopper: bool = True) -> KernelInfo:
    """Return what a kernel's name says of it. Some of it is only known on Hopper."""
    kernel = KernelInfo(_short_name(name), splits=_k_split(name))
    lower = name.lower()
    if name.startswith("nvjet"):
        return _nvjet(kernel, name, hopper)
    if "gemm" in lower and (tile := _gemm_tile(name)):
        instruction = _tall_instruction(name, "wgmma" in name) or "mma.sync"
        return replace(kernel, tile=f"tile {tile}", instruction=instruction)
    if "splitkv" in lower:
        return replace(kernel, splits="keys split")
    if ours := _OURS.match(name):
        return _our_matmul(ours, hopper)
    if _is_flash_4(name):
        return _flash_kernel(name, hopper)
    return kernel


def _k_split(name: str) -> str:
    is_split = re.search(r"split_?k|stream_?k", name, re.IGNORECASE)
    return "K split" if is_split else ""


def _nvjet(kernel: KernelInfo, name: str, hopper: bool) -> KernelInfo:
    """Return what the name of a cuBLAS kernel for Hopper and later says."""
    tile = re.search(r"_(\d+x\d+)_(\d+x\d+)_", name)
    return replace(
        kernel,
        tile=f"tile {tile[1]}" if tile else "",
        splits=kernel.splits or "one chain",
        instruction=_tall_instruction(name, hopper),
    )


def _gemm_tile(name: str) -> str:
    """Return the tile in the name of a GEMM of cuBLAS or CUTLASS, or nothing."""
    found = re.search(r"tilesize(\d+x\d+x\d+)|(\d+x\d+_\d+x\d+)", name)
    return (found[1] or found[2]) if found else ""


def _is_flash_4(name: str) -> bool:
    lower = name.lower()
    return "flash" in lower and ("cute" in lower or name.startswith("kernel_cutlass"))


def _flash_kernel(name: str, hopper: bool) -> KernelInfo:
    if "combine" in name.lower():
        return KernelInfo(FLASH_COMBINE)
    instruction = _tall_instruction(name, hopper)
    return KernelInfo(FLASH, "keys in blocks of 128", "one split", instruction)


def _tall_instruction(name: str, hopper: bool) -> str:
    """Return the tensor cores' instruction for many rows, or nothing.

    It follows from the architecture in the kernel's name, or from that of the GPU.
    """
    if re.search(r"sm10\d", name):
        return "tcgen05"
    return "wgmma" if hopper or "sm90" in name else ""


def _short_name(name: str) -> str:
    """Return a template's name without its arguments, but with what an elementwise kernel does."""
    name = name.replace("(anonymous namespace)::", "")
    name = name.removeprefix("void ").removeprefix("at::native::")
    if re.fullmatch(r"_\w+", name):
        return f"Triton {name}"
    outer = re.split(r"[<(]", name)[0].strip()
    functors = [
        part
        for groups in _FUNCTORS.findall(name[len(outer) :])
        for part in groups
        if part not in ("", "gpu", "Binary")
    ]
    return " ".join([outer, *functors[:1]])[:MAX_NAME]


def _our_matmul(name: re.Match[str], hopper: bool) -> KernelInfo:
    """Return what the name of one of our matmul kernels says.

    Kernels with stages are rings. They take the weight as wgmma's first operand, unless swapped.
    """
    tile, tall = f"tile {name['m']}x{name['n']}x{name['k']}", _tall_instruction("", hopper)
    if name["stages"] is None:
        return _matmul_without_stages(name, tile, tall)
    made = "CuTe shared_matmul" if name["kind"] == "shared_" else "Triton _ring_matmul"
    first = "x first" if name["swapped"] else "weight first"
    return KernelInfo(made, f"{name['stages']} stages of {tile}, {first}", "one chain", tall)


def _matmul_without_stages(name: re.Match[str], tile: str, tall: str) -> KernelInfo:
    """Return what the name says; `tall` is the instruction for many rows."""
    if name["swapped"]:
        tile, num_rows = f"{tile}, weight first", int(name["n"])
    else:
        num_rows = int(name["m"])
    instruction = tall if num_rows >= WGMMA_ROWS else "mma.sync"
    return KernelInfo("Triton _matmul", tile, "one chain", instruction)
