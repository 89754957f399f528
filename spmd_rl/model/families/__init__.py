"""Model families: from a config.json to blocks, and what Megatron-core calls their parameters.

One file a family. All of it is plain data: no torch, no Megatron.
"""

from spmd_rl.model.families.deepseek_v3 import DEEPSEEK_V3, GLM4_MOE_LITE
from spmd_rl.model.families.family import Family
from spmd_rl.model.families.glm4_moe import GLM4_MOE
from spmd_rl.model.families.gpt_oss import GPT_OSS
from spmd_rl.model.families.llama import LLAMA
from spmd_rl.model.families.qwen2 import QWEN2
from spmd_rl.model.families.qwen3 import QWEN3
from spmd_rl.model.families.qwen3_5 import (
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_5_MOE_TEXT,
    QWEN3_5_TEXT,
)
from spmd_rl.model.families.qwen3_moe import QWEN3_MOE
from spmd_rl.model.families.qwen3_next import QWEN3_NEXT

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "glm4_moe": GLM4_MOE,
    "glm4_moe_lite": GLM4_MOE_LITE,
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": DEEPSEEK_V3,
    "gpt_oss": GPT_OSS,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5": QWEN3_5,
    "qwen3_5_text": QWEN3_5_TEXT,
    "qwen3_5_moe": QWEN3_5_MOE,
    "qwen3_5_moe_text": QWEN3_5_MOE_TEXT,
}

__all__ = ["FAMILIES", "Family"]
