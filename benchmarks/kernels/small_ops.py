"""The contract's ops between the products, compared with torch's own kernels and with a copy.

Rows are those of a decoding step (64, 256) and of a training pack (16,384). Each number is the
median over replays of a graph that runs the op once for each of several inputs: together they are
larger than L2, or 2,048 of them where they are tiny. The share of a copy is the time that a copy
would take for what is read and written once.

torch's versions are: indexing; F.rms_norm behind an addition; F.rms_norm and rotation head by head,
then index_copy into the pages; F.silu times up; log_softmax and gather; Gumbel noise and argmax;
results weighted by a softmax of their sums. The head's product with its log-probs is torch.mm and
log_softmax. The inputs and outputs of a decoding step are indexing and arithmetic, an op each, and
copies to the host.

    python -m benchmarks.kernels.small_ops [--save]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from benchmarks.kernels.cases import Case, Op
from benchmarks.kernels.layer_cases import of_adapters, of_cache, of_heads, of_model, of_splits
from benchmarks.kernels.step_cases import LOGIT_ROWS, of_head, of_step, of_vocabulary
from benchmarks.kernels.timing import copy_bytes_per_s, microseconds
from benchmarks.record import compared, finish, gpu, measured
from benchmarks.table import Row

MODELS = ("0.6B", "8B")
DECODING, TRAINING = (64, 256), 16384
COLD_BYTES = 256 << 20
CALLS, MOST_CALLS = 8, 2048


def measure(case: Case, copy: float) -> Iterator[Row]:
    inputs = [case.inputs()]
    size = sum(one.numel() * one.element_size() for one in inputs[0])
    inputs += [
        case.inputs() for _ in range(min(max(CALLS, -(-COLD_BYTES // size)), MOST_CALLS) - 1)
    ]

    def time(op: Op) -> float:
        return microseconds(lambda given: op(*given), inputs, case.rounds)

    with torch.no_grad():
        ours = time(case.ours)
        yield compared(case.what, ours, "us", peer="torch", peer_value=time(case.torch))
    yield measured(f"{case.what}, share of a copy", 1e6 * case.num_bytes / copy / ours, "")


def main() -> int:
    sizes = (*DECODING, TRAINING)
    cases = [
        case
        for name in MODELS
        for rows in sizes
        for of in (of_model, of_adapters, of_heads)
        for case in of(name, rows)
    ]
    cases += [case for rows in sizes for case in of_cache(rows)]
    cases += [case for rows in DECODING for case in of_step(rows)]
    cases += [case for rows in DECODING for case in of_vocabulary(rows, decoding=True)]
    cases += of_vocabulary(LOGIT_ROWS, decoding=False)
    cases += [case for rows in DECODING for case in of_splits(rows)]
    cases += of_head("0.6B")
    copy = copy_bytes_per_s()
    rows = [measured("copy, read and written", copy / 1e12, "TB/s")]
    for case in cases:
        rows += measure(case, copy)
        torch.cuda.empty_cache()
    return finish(
        __file__, ("torch", "triton"), rows, save="--save" in sys.argv, machine="h200", **gpu()
    )


if __name__ == "__main__":
    sys.exit(main())
