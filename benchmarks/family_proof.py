"""The proof of grpo_proof.py for other families: every token's log-prob, bit for bit.

Each has eight layers of the published widths: Qwen3.5-9B and 35B-A3B, six of whose layers keep a
state; Moonlight, with latents; and gpt-oss-20b, with windows, sinks and biased experts. Of the
largest ones, the optimizer's moments are in host memory.

    python -m benchmarks.family_proof [--save] [3.5-9B@8 3.5-35B-A3B@8 moonlight@8 gpt-oss-20b@8]
"""

from __future__ import annotations

import sys

from benchmarks.grpo_proof import FAMILIES, prove

if __name__ == "__main__":
    sys.exit(prove(__file__, __doc__, list(FAMILIES)))
