"""Decode step of a hybrid, in our engine and in SGLang, as engine_vs_sglang.py measures it.

Eight layers of Qwen3.5-9B keep their states in fp32 in both engines. Beside it is the floor of
bytes: each weight read once, each state read and written once, at the speed of a large copy.

    python -m benchmarks.hybrid_vs_sglang --sglang SITE [--save]
"""

from __future__ import annotations

import sys

from benchmarks.engine_vs_sglang import HYBRID, REPEATS, measure
from benchmarks.sglang_cli import beside_sglang

if __name__ == "__main__":
    sys.exit(beside_sglang(__file__, __doc__, [HYBRID], REPEATS, measure))
