"""Model shapes of the GPU benchmarks, with random weights.

    python -m benchmarks.shapes 0.6B FOLDER

The cost of a step depends on the shapes alone, so nothing has to be downloaded.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from spmd_rl.model.hf import save_folder
from spmd_rl.model.read import read_spec
from spmd_rl.model.spec import ModelSpec

HEAD_DIM = 128
VOCAB = 151936
# hidden, intermediate, layers, heads, key-value heads, tied head
QWEN3 = {
    "0.6B": (1024, 3072, 28, 16, 8, True),
    "4B": (2560, 9728, 36, 32, 8, True),
    "8B": (4096, 12288, 36, 32, 8, False),
    "32B": (5120, 25600, 64, 64, 8, False),
}
# hidden, intermediate, layers, heads, key-value heads, tied head, size of heads, value heads of
# states
QWEN3_5 = {
    "3.5-0.8B": (1024, 3584, 24, 8, 2, True, 256, 16),
    "3.5-9B": (4096, 12288, 32, 16, 4, False, 256, 32),
    "3.5-35B-A3B": (2048, 512, 40, 16, 2, False, 256, 32),
}
MOONLIGHT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 163840,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.446,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 8192,
    "num_nextn_predict_layers": 0,
    "rope_theta": 50000.0,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 163586,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "rms_norm_eps": 1e-5,
    "eos_token_id": 200002,
}
PUBLISHED: dict[str, dict[str, object]] = {"moonlight": MOONLIGHT, "gpt-oss-20b": GPT_OSS}
STATES_LAST = -4.0  # `dt_bias` of random weights: about 0.95 of a state is left at each token
MIXTURE = "30B-A3B"
MIXTURE_SIZES = (2048, 6144, 48, 32, 4, False)
# what its config.json has beside or in place of what a dense model's has
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# a shape for tries of a script on a CPU
TINY = "tiny"
TINY_SIZES = (64, 128, 2, 8, 4, True)
TINY_KEYS = {"head_dim": 16, "vocab_size": 1024}
MORE_KEYS: dict[str, dict[str, object]] = {MIXTURE: EXPERTS, TINY: TINY_KEYS}
MEASURED_FLOPS_PER_S = 788e12  # an 8192^3 bf16 product of random data, measured on an H200


def config(name: str) -> dict[str, object]:
    """Return the config.json of a model of this size; "SIZE@N" has N layers."""
    name, _, few = name.partition("@")
    if name in PUBLISHED:
        whole = PUBLISHED[name] | {"dtype": "bfloat16", "initializer_range": 0.02}
        return whole | ({"num_hidden_layers": int(few)} if few else {})
    if name in QWEN3_5:
        return hybrid_config(name, int(few or QWEN3_5[name][2]))
    sizes = QWEN3 | {MIXTURE: MIXTURE_SIZES, TINY: TINY_SIZES}
    hidden, inner, layers, heads, kv_heads, tied = sizes[name]
    dense = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": int(few or layers),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": tied,
        "use_sliding_window": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "torch_dtype": "bfloat16",
    }
    return dense | MORE_KEYS.get(name, {})


def hybrid_config(name: str, layers: int) -> dict[str, object]:
    """Return the config.json of the text model of a Qwen3.5 of this size."""
    hidden, inner, _, heads, kv_heads, tied, head_dim, value_heads = QWEN3_5[name]
    experts: dict[str, object] = {}
    if "-A" in name:
        experts = {
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": inner,
            "shared_expert_intermediate_size": inner,
        }
    return {
        "model_type": "qwen3_5_moe_text" if experts else "qwen3_5_text",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "tie_word_embeddings": tied,
        "eos_token_id": 248046,
        "dtype": "bfloat16",
        **experts,
    }


def title(name: str) -> str:
    """Return a shape's name for people: Qwen3-8B, or Qwen3.5-9B@8."""
    if name.partition("@")[0] in PUBLISHED:
        return name
    return f"Qwen{name}" if is_hybrid(name) else f"Qwen3-{name}"


def is_hybrid(name: str) -> bool:
    """Whether most of a shape's layers keep a state."""
    return name.partition("@")[0] in QWEN3_5


def write_vision_config(name: str, folder: Path) -> ModelSpec:
    """Write the folder of a Qwen3.5 with its vision model, as SGLang wants it, without weights."""
    text = config(name)
    rope = {"rope_type": "default", "mrope_section": [11, 11, 10], "mrope_interleaved": True}
    text["rope_parameters"] |= rope
    text |= {"full_attention_interval": 4, "mamba_ssm_dtype": "float32"}
    whole = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "vision_config": {
            "model_type": "qwen3_5",
            "depth": 1,
            "out_hidden_size": text["hidden_size"],
        },
        "tie_word_embeddings": text["tie_word_embeddings"],
        "eos_token_id": text["eos_token_id"],
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(whole, indent=2) + "\n")
    return read_spec(folder)


def write_config(name: str, folder: Path, tokenizer_of: Path | None = None) -> ModelSpec:
    """Write a model folder without weights, with another's tokenizer if the run needs text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(name), indent=2) + "\n")
    for file in ("tokenizer.json", "tokenizer_config.json") if tokenizer_of else ():
        shutil.copyfile(tokenizer_of / file, folder / file)
    return read_spec(folder)


def write_folder(name: str, folder: Path, tokenizer_of: Path | None = None) -> ModelSpec:
    """Write a complete model folder with random bf16 weights."""
    spec = write_config(name, folder, tokenizer_of)
    save_folder(folder, folder, random_weights(spec), torch.bfloat16)
    return spec


def random_weights(spec: ModelSpec, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter by name, in fp32: normally distributed matrices.

    Those that write to the residual stream are scaled by the depth.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(seed)
    depth = 1 / math.sqrt(2 * spec.num_layers)
    for tensor in spec.parameters():
        name, shape = tensor.name, tensor.shape
        if len(shape) == 1:
            start = STATES_LAST if name.endswith("dt_bias") else tensor.start
            yield name, torch.full(shape, start, device=device)
            continue
        scale = spec.init_std * (
            depth
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
            else 1.0
        )
        yield name, torch.randn(shape, device=device, generator=generator).mul_(scale)


if __name__ == "__main__":
    write = write_vision_config if is_hybrid(sys.argv[1]) else write_folder
    write(sys.argv[1], Path(sys.argv[2]))
