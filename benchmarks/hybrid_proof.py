"""The proof of grpo_proof.py for layers with a state: every token's log-prob, bit for bit.

`3.5-9B@8` and `3.5-35B-A3B@8` have eight layers of the widths of these Qwen3.5, six of them with a
state. The latter keeps the optimizer's moments in host memory.

    python -m benchmarks.hybrid_proof [--save] [3.5-9B@8 3.5-35B-A3B@8]
"""

from __future__ import annotations

import sys

from benchmarks.grpo_proof import prove

if __name__ == "__main__":
    sys.exit(prove(__file__, __doc__, ["3.5-9B@8", "3.5-35B-A3B@8"]))
