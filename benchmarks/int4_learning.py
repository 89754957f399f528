"""What 4 bits cost in learning: GRPO with whole weights, in 8 bits and in 4, several seeds of each.

    python -m benchmarks.int4_learning arithmetic --save

Runs and rows are those of coded_learning.py.
"""

from __future__ import annotations

import sys

from benchmarks.coded_learning import WEIGHTS, compare

FORMATS = {
    "full": [],
    "weights in 8 bits": WEIGHTS,
    "weights in 4 bits": ["--trainer.weights=int4", "--engine.weights=int4"],
}

if __name__ == "__main__":
    sys.exit(compare(__file__, __doc__, FORMATS))
