"""Run under torchrun by test_optimizers.py: `optimizer_ranks.py OUT.json`.

Writes the digests of weights after some steps of each optimizer over NCCL.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from tests.dist.test_optimizers import updated
from tests.dist.trainers import context_of

if __name__ == "__main__":
    context = context_of(1)
    group = context.mesh.get_group("fsdp")
    report = {kind: updated(kind, group, context.device)[0] for kind in ("adamw", "muon")}
    if context.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(report))
    dist.destroy_process_group()
