"""Products of few rows of x with a weight in few bits, by warps that decode it: coded_gemm.cu.

mma.sync multiplies eight rows of the weight, where wgmma takes 64. So with few rows of x, narrow
weights are spread over all multiprocessors. With more rows, wgmma is faster. The bits are those of
`coded_gemm_triton.py`, which serves where cuda-bindings is missing.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from spmd_rl.kernels.low_precision.block_codes import BlockCodes
from spmd_rl.kernels.runtime.nvrtc import kernel, launch_dependent

SOURCE = Path(__file__).with_name("coded_gemm.cu")
PADDING = 16  # bytes of a row in shared memory
ANY = 1 << 31
ALIGNMENT = 1024  # of a swizzled tile
SHARED_BYTES, RESERVED_BYTES = 226 << 10, 1 << 10  # of a multiprocessor, and for each block
MOST_STAGES, MOST_GROUPED_STAGES = 12, 8


class WarpTile(NamedTuple):
    """Sizes of a block of threads: `rows` of the weight and `cols` of x, and how many warps.

    A step takes `step` columns. `blocks` share a multiprocessor. If `grouped`, four warps multiply
    64 rows of the weight with wgmma; else each multiplies eight rows at a time, by up to 16 of x.
    """

    rows: int
    cols: int
    warps: int
    step: int
    blocks: int = 1
    grouped: bool = False

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def stage_bytes(self, bits: int) -> int:
        """Return the shared memory of a step of codes of so many bits, and of x."""
        codes = self.rows * (self.step * bits // 8 + PADDING)
        if self.grouped:
            return -(-(codes + self.cols * 2 * self.step) // ALIGNMENT) * ALIGNMENT
        return codes + self.cols * (2 * self.step + PADDING)

    def stages(self, bits: int) -> int:
        """Return how many steps are in shared memory or on their way."""
        fit = (SHARED_BYTES // self.blocks - RESERVED_BYTES) // self.stage_bytes(bits)
        return min(fit, MOST_GROUPED_STAGES if self.grouped else MOST_STAGES)


# Row bucket: tiles for weights up to so many rows. They were chosen from the fastest ones for the
# products of Qwen3-8B on an H200 (`benchmarks.kernels.coded_gemm --tiles`), for both formats.
WARP_TILES: dict[int, tuple[tuple[int, WarpTile], ...]] = {
    8: (
        (4096, WarpTile(16, 8, 2, 512, 2)),
        (8192, WarpTile(16, 8, 2, 256, 3)),
        (ANY, WarpTile(64, 8, 4, 256, 3)),
    ),
    16: (
        (4096, WarpTile(32, 16, 4, 512)),
        (8192, WarpTile(48, 16, 6, 512)),
        (ANY, WarpTile(192, 16, 12, 256)),
    ),
    32: (
        (8192, WarpTile(64, 32, 4, 256, grouped=True)),
        (ANY, WarpTile(64, 32, 4, 128, 3, grouped=True)),
    ),
    64: (
        (4096, WarpTile(64, 32, 4, 256, grouped=True)),
        (8192, WarpTile(64, 64, 4, 256, grouped=True)),
        (ANY, WarpTile(192, 64, 12, 128, grouped=True)),
    ),
    128: (
        (4096, WarpTile(64, 64, 4, 256, grouped=True)),
        (8192, WarpTile(64, 128, 4, 128, grouped=True)),
        (ANY, WarpTile(192, 128, 12, 128, grouped=True)),
    ),
    256: (
        (4096, WarpTile(64, 128, 4, 128, grouped=True)),
        (8192, WarpTile(128, 128, 8, 128, grouped=True)),
        (ANY, WarpTile(192, 128, 12, 128, grouped=True)),
    ),
}
MOST_ROWS = max(WARP_TILES)


def choose_warp_tile(m: int, n: int) -> WarpTile:
    """Return the tile for 1 to `MOST_ROWS` rows of x and a weight of n rows."""
    row = next(row for rows, row in WARP_TILES.items() if m <= rows)
    return next(tile for most, tile in row if n <= most)


def warp_matmul_into(
    out: Tensor, x: Tensor, weight: BlockCodes, bias: Tensor | None, tile: WarpTile
) -> None:
    """Write x @ decoded weight.T + bias to `out`, accumulated in fp32 and rounded once.

    While a CUDA graph is recorded, no kernel of it may write the codes or the scales.
    Shape: out [M, N] bf16 with contiguous rows, x [M, K] bf16 whose rows begin at multiples of 16
    bytes, as contiguous codes do, bias [N]. K is a multiple of 16.
    """
    (m, k), n, bits = x.shape, out.shape[1], weight.format.bits
    numbers = m, n, k, weight.codes.stride(0), x.stride(0), out.stride(0)
    early = torch.cuda.is_current_stream_capturing()  # codes are read before kernels ahead end
    with torch.cuda.device(x.device):
        launch_dependent(
            _function(bits, tile, torch.cuda.current_device()),
            -(-m // tile.cols) * -(-n // tile.rows),
            tile.threads,
            tile.stages(bits) * tile.stage_bytes(bits),
            (weight.codes, weight.scales, x, bias, out, *numbers, early),
        )


@cache
def _function(bits: int, tile: WarpTile, device: int) -> int:
    """Return the handle of the kernel for a tile on a device, the current one."""
    source = SOURCE.read_text(encoding="utf-8") + group_product(tile.cols) * tile.grouped
    shared_bytes = tile.stages(bits) * tile.stage_bytes(bits)
    return kernel(source, kernel_name(bits, tile), shared_bytes, device)


def kernel_name(bits: int, tile: WarpTile) -> str:
    """Return the template of coded_gemm.cu with its arguments."""
    sizes = bits, tile.rows, tile.cols, tile.warps, tile.step, tile.stages(bits), tile.blocks
    return f"coded_matmul<{', '.join(map(str, sizes))}, {str(tile.grouped).lower()}>"


def group_product(cols: int) -> str:
    """Return the C++ source of `multiply_group` for so many rows of x: a wgmma names each sum."""
    count = cols // 2
    sums = ", ".join(f"%{one}" for one in range(count))
    rows = ", ".join(f"%{one}" for one in range(count, count + 4))
    written = ", ".join(f'"+f"(sums[{one}])' for one in range(count))
    read = ", ".join(f'"r"(rows[{one}])' for one in range(4))
    return f"""
template <>
__device__ inline void multiply_group<{cols}>(float* sums, const u32 (&rows)[4], u64 x) {{
    asm volatile("{{ .reg .pred adds; setp.eq.b32 adds, 0, 0; "
                 "wgmma.mma_async.sync.aligned.m64n{cols}k16.f32.bf16.bf16 {{{sums}}}, {{{rows}}}, "
                 "%{count + 4}, adds, 1, 1, 0; }}"
                 : {written} : {read}, "l"(x));
}}
"""
