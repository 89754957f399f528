"""One op, one file. Trainer and engine call the same ops, so that their bits agree (docs/numerics.md)."""

from spmd_rl.kernels.activation import silu_mul
from spmd_rl.kernels.attention import blocked_attention
from spmd_rl.kernels.contract import contract
from spmd_rl.kernels.embedding import embed
from spmd_rl.kernels.gated import silu_mul_linear
from spmd_rl.kernels.head import head_logprobs
from spmd_rl.kernels.kv_write import KvPlace, write_kv
from spmd_rl.kernels.linear import is_exact, linear, linear_fp32
from spmd_rl.kernels.logprob import token_logprobs
from spmd_rl.kernels.norm import add_rms_norm, rms_norm
from spmd_rl.kernels.packed_attention import PackedAttention
from spmd_rl.kernels.paged_attention import KvCache, PagedAttention
from spmd_rl.kernels.remake import remaking
from spmd_rl.kernels.rope import qk_norm_rope, qk_norm_rope_into, rope, rope_table
from spmd_rl.kernels.sampling import (
    gumbel_noise,
    position_keys,
    sample_and_score,
    sample_tokens,
    stream_bases,
    stream_keys,
)
from spmd_rl.kernels.tile import ROW_TILE, cut_rows, pad_rows, padded_rows

__all__ = [
    "ROW_TILE",
    "KvCache",
    "KvPlace",
    "PackedAttention",
    "PagedAttention",
    "add_rms_norm",
    "blocked_attention",
    "contract",
    "cut_rows",
    "embed",
    "gumbel_noise",
    "head_logprobs",
    "is_exact",
    "linear",
    "linear_fp32",
    "pad_rows",
    "padded_rows",
    "position_keys",
    "qk_norm_rope",
    "qk_norm_rope_into",
    "remaking",
    "rms_norm",
    "rope",
    "rope_table",
    "sample_and_score",
    "sample_tokens",
    "silu_mul",
    "silu_mul_linear",
    "stream_bases",
    "stream_keys",
    "token_logprobs",
    "write_kv",
]
