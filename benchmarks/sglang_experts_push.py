"""Push of a mixture into SGLang on one GPU, beside SGLang's own update from tensors.

    python -m benchmarks.sglang_experts_push --python /tmp/sgl [--layers 8] [--save]

The shape is that of Qwen3-30B-A3B with fewer layers. Bytes and names of a layer are those of the
whole model, so the ratio is, too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.record import finish, gpu, gpu_machine, measured
from benchmarks.sglang_engine import TOKENIZER_OF, push_rows
from benchmarks.shapes import MIXTURE, random_weights, write_config
from spmd_rl.rollout.sglang.build import build
from spmd_rl.rollout.sglang.config import SglangEngineConfig
from spmd_rl.rollout.sglang.options import ask_site


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default="", help="as engine.python")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--save", action="store_true", help="write the result")
    words = parser.parse_args()
    options = {"attention_backend": "triton", "cuda_graph_max_bs_decode": 8}
    cfg = SglangEngineConfig(python=words.python, options=options, max_batch=8)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        spec = write_config(f"{MIXTURE}@{words.layers}", folder, TOKENIZER_OF)
        weights = {key: tensor.to(torch.bfloat16) for key, tensor in random_weights(spec)}
        engine = build(cfg, str(folder), torch.device("cuda", 0))
        try:
            rows = [
                measured("layers of Qwen3-30B-A3B", words.layers, ""),
                measured("bytes", sum(one.nbytes for one in weights.values()) / 2**30, "GiB"),
                *push_rows(engine, weights),
            ]
        finally:
            engine.close()
    version = ask_site(cfg.python).version
    return finish(
        __file__, ("torch",), rows, save=words.save, machine=gpu_machine(), sglang=version, **gpu()
    )


if __name__ == "__main__":
    sys.exit(main())
