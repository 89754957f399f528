"""Training step of a hybrid with eight layers of Qwen3.5-9B, beside the same step with the forward
pass of fla-core in chunks, in the place of the recurrence, as train_step.py measures it.

    python -m benchmarks.hybrid_train_step [--save]
"""

from __future__ import annotations

import sys

from benchmarks.engine_vs_sglang import HYBRID
from benchmarks.train_step import main

if __name__ == "__main__":
    sys.exit(main(__file__, __doc__, [HYBRID], ["contract", "chunked"]))
