"""Ops of the network and of sampling, one file each.

Trainer and engine call the same ops, so that their bits agree (docs/numerics.md).
"""

from spmd_rl.kernels.attention.backend import AttentionBackend, attention_backend
from spmd_rl.kernels.attention.blocked import blocked_attention
from spmd_rl.kernels.attention.packed import PackedAttention
from spmd_rl.kernels.attention.paged import KvCache, PagedAttention
from spmd_rl.kernels.attention.token_attention import TokenAttention
from spmd_rl.kernels.contract import contract
from spmd_rl.kernels.linear.linear import is_exact, linear, linear_fp32
from spmd_rl.kernels.linear.swiglu import silu_mul_linear
from spmd_rl.kernels.rowwise.activation import silu_mul
from spmd_rl.kernels.rowwise.embedding import embed
from spmd_rl.kernels.rowwise.kv_write import KvSlots, write_kv
from spmd_rl.kernels.rowwise.norm import add_rms_norm, rms_norm
from spmd_rl.kernels.rowwise.rope import qk_norm_rope, qk_norm_rope_into, rope, rope_table
from spmd_rl.kernels.rowwise.rope_inputs import QkNorm, Rotary
from spmd_rl.kernels.runtime.padding import ROW_TILE, pad_rows, padded_rows, unpad_rows
from spmd_rl.kernels.runtime.recompute import recomputing
from spmd_rl.kernels.vocab.lm_head import head_logprobs
from spmd_rl.kernels.vocab.logprob import candidate_logprobs, token_logprobs, token_scores
from spmd_rl.kernels.vocab.sampling import (
    gumbel_noise,
    position_keys,
    sample_and_score,
    sample_tokens,
    stream_bases,
    stream_keys,
)
from spmd_rl.kernels.vocab.scores import Scores

__all__ = [
    "ROW_TILE",
    "AttentionBackend",
    "KvCache",
    "KvSlots",
    "PackedAttention",
    "PagedAttention",
    "QkNorm",
    "Rotary",
    "Scores",
    "TokenAttention",
    "add_rms_norm",
    "attention_backend",
    "blocked_attention",
    "candidate_logprobs",
    "contract",
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
    "recomputing",
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
    "token_scores",
    "unpad_rows",
    "write_kv",
]
