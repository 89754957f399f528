"""Test of the microscope: it must find planted faults, and explain the difference to transformers.

On a GPU it uses a model with the layer shapes of Qwen3-0.6B in bfloat16, on a CPU a small one in
float32, both with random weights. The value of a row is the number of outputs that differ on the
same input, at the first op that introduces a difference. A row holds if the fault was found where
it was planted and no other kind of op introduces a difference. For transformers it holds if the
named arithmetic accounts for every row of both sides.

    python -m benchmarks.mismatch [--save] [--pages DIR]
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.record import finish, gpu, gpu_machine, measured
from benchmarks.table import Row
from spmd_rl.microscope.diagnose.faults import plant
from spmd_rl.microscope.examine import Examination, ReplaySetup, examine
from spmd_rl.microscope.page.report_data import write_report
from spmd_rl.microscope.replay.case import ReplayCase, ReplaySequence
from spmd_rl.microscope.replay.engine_pass import EnginePass
from spmd_rl.microscope.replay.forward_pass import ReferencePass, TrainerPass, load_model
from spmd_rl.model.hf import random_weights, save_folder
from spmd_rl.model.network import CausalLM
from spmd_rl.model.read import read_spec
from spmd_rl.rollout.native.config import NativeEngineConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
KEYS = ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "vocab_size")
SHAPES = dict(
    zip(
        KEYS,
        (1024, 3072, 16, 128, 32768) if DEVICE.type == "cuda" else (64, 192, 4, 16, 104),
        strict=True,
    )
)
SIZES = (
    ((9, 24), (9, 40), (150, 40), (600, 20), (90, 60))
    if DEVICE.type == "cuda"
    else ((9, 7), (50, 100), (17, 5))
)
EXPECTED = {
    "split-k": "layer {middle} down_proj",
    "split-k-qkv": "layer {middle} q_proj",
    "split-k-gate-up": "layer {middle} act",
    # a CPU's contract is that
    **({"library-linear": "layer {middle} down_proj"} if DEVICE.type == "cuda" else {}),
    "norm-order": "layer {middle} post_norm",
    "rope-bf16": "layer 0 q",
    "logits-bf16": "logits",
    "auto-splits": "layer 0 attention",
    "library-logprob": "logprob",
}
ALSO = {"rope-bf16": {"k"}, "split-k-qkv": {"k_proj", "v_proj"}}  # other ops that the fault is in
NUM_LAYERS = 6


def write_model(folder: Path) -> Path:
    """Write a Qwen3 model with random weights, also in its norms, that both loaders can read."""
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": NUM_LAYERS,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "initializer_range": 0.05,
        "num_key_value_heads": SHAPES["num_attention_heads"] // 2,
        **SHAPES,
    }
    (folder / "like").mkdir(parents=True)
    (folder / "like" / "config.json").write_text(json.dumps(config))
    spec = read_spec(folder / "like")
    model = CausalLM(spec)
    model.load_state_dict(dict(random_weights(spec, seed=0)))
    generator = torch.Generator().manual_seed(1)
    weights = (
        (name, one + 0.2 * torch.randn(one.shape, generator=generator) if one.ndim == 1 else one)
        for name, one in model.named_parameters()
    )
    save_folder(folder / "hf", folder / "like", weights, DTYPE)
    return folder / "hf"


def sequences(vocab: int) -> ReplayCase:
    rng = np.random.default_rng(0)
    stem = rng.integers(2, vocab, 1200)
    return ReplayCase(
        tuple(
            ReplaySequence(f"{n}:0", stem[:p], rng.integers(2, vocab, r))
            for n, (p, r) in enumerate(SIZES)
        )
    )


def engine(folder: Path) -> EnginePass:
    return EnginePass(
        load_model(folder, DTYPE, DEVICE), NativeEngineConfig(max_batch=64, max_step_tokens=512)
    )


def comparisons(folder: Path, case: ReplayCase) -> Iterator[tuple[str, Examination]]:
    """Yield each fault against the trainer, and both our forward passes against transformers."""
    trainer, model = TrainerPass(load_model(folder, DTYPE, DEVICE)), str(folder)
    yield "engine, trainer", examine(ReplaySetup(case, engine(folder), trainer, model))
    for fault in EXPECTED:
        path = engine(folder)
        plant(fault, path)
        yield fault, examine(ReplaySetup(case, path, trainer, model, planted=fault))
    yield (
        "engine, transformers",
        examine(ReplaySetup(case, engine(folder), ReferencePass(folder, DTYPE, DEVICE), model)),
    )


def rows(name: str, found: Examination) -> Iterator[Row]:
    """Yield a row for each kind of op that introduces a difference, or one row if none does."""
    if not found.comparison.results and name in EXPECTED:
        yield Row(what=f"{name}: not found", value=0, unit="outputs", bar="explained", holds=False)
    elif not found.comparison.results:
        yield measured(
            f"{name}: {found.comparison.num_compared_rows:,} rows, differing", 0, "rows", at_most=0
        )
    findings = {one.point: one for one in found.comparison.results}
    ops = {point.op for point, one in findings.items() if one.status == "introduced"}
    for point, cause in found.explanations.items():
        one, expected = findings[point], EXPECTED.get(name, "").format(middle=NUM_LAYERS // 2)
        sides = cause.left.matches, cause.right.matches
        said = "; ".join(
            " + ".join(f"{match.description} [{match.num_rows}]" for match in side) or "-"
            for side in sides
        )
        explained = all(sum(match.num_rows for match in side) == one.num_rows for side in sides)
        place = str(next(iter(found.explanations)))
        alone = not expected or (
            place == expected and ops == {expected.split()[-1]} | ALSO.get(name, set())
        )
        result = measured(
            f"{name}: {point} ({said})",
            one.same_input.unequal,
            f"of {one.same_input.total:,} outputs",
        )
        holds = explained and alone
        yield Row(
            what=result.what, value=result.value, unit=result.unit, bar="explained", holds=holds
        )
    last = found.comparison.results[-1:]
    yield from (
        measured(f"{name}: largest change of a log-prob", one.largest_difference, "nats")
        for one in last
    )


def main(words: list[str]) -> int:
    pages = Path(words[words.index("--pages") + 1]) if "--pages" in words else None
    lines: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_model(Path(temporary))
        case = sequences(read_spec(folder).vocab_size)
        for name, found in comparisons(folder, case):
            print(f"{name}: {found.verdict}", flush=True)
            lines += rows(name, found)
            if pages is not None:
                write_report(found, pages)
    packages, save = ("torch", "transformers"), "--save" in words
    if DEVICE.type == "cpu":
        return finish(__file__, packages, lines, save=save)
    return finish(
        __file__,
        (*packages, "triton", "flash-attn-4"),
        lines,
        save=save,
        machine=gpu_machine(),
        **gpu(),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
