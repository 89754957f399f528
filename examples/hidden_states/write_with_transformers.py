"""Write a dump of hidden states with transformers, for `spmd-rl mismatch --right dump`.

    spmd-rl mismatch RUN --write-inputs inputs.json
    python write_with_transformers.py inputs.json dump.safetensors
    spmd-rl mismatch RUN --left trainer --right dump --dump dump.safetensors

Another program does the same in its own way: it computes each sequence of the inputs, and keeps the
outputs that it can show. It needs torch and safetensors, and nothing of spmd_rl.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

# Modules of a layer, and the point that each one's output or first input is.
OUTPUTS = {
    "input_layernorm": "input_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "o_proj",
    "post_attention_layernorm": "post_norm",
    "mlp.gate_proj": "gate_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "down_proj",
}
INPUTS = {"self_attn.o_proj": "attention", "mlp.down_proj": "act"}


def hook(model: Any, keep: Callable[[str, Tensor], None]) -> None:
    """Pass every output that has a point to `keep`, without the dimension of the batch."""

    def on_output(module: Any, name: str) -> None:
        module.register_forward_hook(lambda _, args, output: keep(name, output[0]))

    def on_input(module: Any, name: str) -> None:
        module.register_forward_pre_hook(lambda _, args: keep(name, args[0][0]))

    on_output(model.model.embed_tokens, "embed")
    on_output(model.model.norm, "final_norm")
    for number, layer in enumerate(model.model.layers):
        for path, op in OUTPUTS.items():
            on_output(layer.get_submodule(path), f"layers.{number}.{op}")
        for path, op in INPUTS.items():
            on_input(layer.get_submodule(path), f"layers.{number}.{op}")


@torch.no_grad()
def dump(model: Any, sequences: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return the tensors of a dump: all sequences end to end, one row for each token."""
    parts: dict[str, list[Tensor]] = {}

    def keep(name: str, rows: Tensor) -> None:
        parts.setdefault(name, []).append(rows.detach().to("cpu", copy=True))

    hook(model, keep)
    num_rows = 0
    for sequence in sequences:
        tokens = torch.tensor(sequence["tokens"], device=model.device)
        # The rows whose logits predict a token of the response.
        scored = torch.arange(sequence["num_prompt_tokens"] - 1, len(tokens) - 1)
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, scored]
        logprobs = (logits.float() / sequence["temperature"]).log_softmax(-1)
        keep("tokens", tokens)
        keep("positions", torch.arange(len(tokens)))
        keep("scored", scored + num_rows)
        keep("logits", logits)
        keep("logprob", logprobs.gather(1, tokens[scored + 1][:, None])[:, 0])
        num_rows += len(tokens)
    return {name: torch.cat(rows).contiguous() for name, rows in parts.items()}


def main(inputs: str, target: str) -> None:
    asked = json.loads(Path(inputs).read_text())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(asked["model"], dtype=dtype)
    metadata = {
        "format": "hidden-states-1",
        "program": f"transformers {transformers.__version__}",
        "model": asked["model"][-200:],
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
    }
    save_file(dump(model.to(device), asked["sequences"]), target, metadata)


if __name__ == "__main__":
    main(*sys.argv[1:])
