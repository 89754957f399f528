"""`spmd-rl mismatch`: replay tokens through two forward passes, compare, and write a report."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import torch

from spmd_rl.errors import ConfigError
from spmd_rl.kernels.attention.backend import attention_backend
from spmd_rl.kernels.contract import dtype_of
from spmd_rl.microscope.diagnose.faults import FAULTS, plant
from spmd_rl.microscope.examine import ReplaySetup, examine
from spmd_rl.microscope.page.report_data import write_report
from spmd_rl.microscope.replay import inputs
from spmd_rl.microscope.replay.case import ReplayCase
from spmd_rl.microscope.replay.engine_pass import EnginePass
from spmd_rl.microscope.replay.forward_pass import (
    ForwardPass,
    ReferencePass,
    TrainerPass,
    load_model,
)
from spmd_rl.microscope.replay.inputs import RecordedSample
from spmd_rl.microscope.replay.weights import ReplayWeights, final_weights, sampling_weights
from spmd_rl.model.spec import ModelSpec
from spmd_rl.observe.run_folder import refuse_links
from spmd_rl.rollout.engine import NativeEngineConfig

PASSES = ("engine", "trainer", "transformers")
SPLIT = "attention_split"
ENGINE_KEYS = (
    "page_size",
    "num_pages",
    "max_batch",
    "max_step_tokens",
    "prefix_cache",
    "cuda_graphs",
    SPLIT,
)
TRAINER_KEYS = ("max_tokens", "logit_rows", "recompute", SPLIT)
EXIT_AGREE, EXIT_DIFFER = 0, 1


class _MismatchParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"spmd-rl mismatch: {message}")


@dataclass(frozen=True)
class _RunInputs:
    """The run to replay, if there is one, with its settings, the case and the weights."""

    run: Path | None
    settings: dict[str, Any]
    case: ReplayCase
    weights: ReplayWeights

    @property
    def run_name(self) -> str:
        return str(self.settings.get("run", {}).get("name") or (self.run or Path()).name)


def main(words: list[str]) -> int:
    """`spmd-rl mismatch`: compare two forward passes over the same tokens.

    The exit code is 0 if all bits agree, every sequence reads its own history and nothing is NaN; 1
    if not; 2 for bad input; 3 if it could not be found out.
    """
    options = _parse(words)
    run = Path(options.run) if options.run else None
    settings = inputs.run_settings(run) if run else {}
    folder = _report_folder(options, run)
    with TemporaryDirectory() as temporary:
        loaded = _load(options, run, settings, Path(temporary) / "model")
        _make_folder(folder)
        setup = _setup(options, loaded, words)
        for note in setup.notes:
            print(note)
        examination = examine(setup)
        page = write_report(examination, folder)
    print(examination.verdict)
    print(page)
    return EXIT_AGREE if examination.comparison.agree else EXIT_DIFFER


def drop_splits(
    settings: dict[str, Any], head_dim: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Remove attention splits from a run's settings if they cannot run here.

    Returns whether there were any.
    """
    if attention_backend(head_dim, dtype, device).has_splits:
        return False
    dropped = [
        role.pop(SPLIT, 0) for role in (settings.get("engine", {}), settings.get("trainer", {}))
    ]
    return any(dropped)


def _parse(words: list[str]) -> argparse.Namespace:
    options = _parser().parse_args(words)
    _check(options)
    return options


def _check(options: argparse.Namespace) -> None:
    """Raises: ConfigError for options that make no sense together."""
    if options.left == options.right:
        raise ConfigError(
            f"--left and --right are both '{options.left}': choose two different ones"
        )
    if options.plant and options.left != "engine":
        raise ConfigError("--plant needs --left engine: a fault is planted in the engine")
    if options.model is None and options.run is None:
        raise ConfigError("name the folder of a run, or a model with --model and --prompts")
    if options.prompts and (options.samples or options.step is not None):
        raise ConfigError(
            "--prompts are replayed instead of samples: leave out --samples and --step"
        )
    if not (options.prompts or options.run):
        raise ConfigError("--model needs --prompts, or the folder of a run whose samples to replay")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU here")


def _report_folder(options: argparse.Namespace, run: Path | None) -> Path:
    """Return the folder of the report. It may lie in the run's, which must not have links then."""
    if options.out:
        return Path(options.out)
    if run:
        refuse_links(run)
    return (run or Path()) / "mismatch"


def _make_folder(path: Path) -> None:
    """Make the folder before the work is done.

    Raises: ConfigError if it cannot be made or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be made: {error.strerror}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"nothing can be written to {path}")


def _load(
    options: argparse.Namespace, run: Path | None, settings: dict[str, Any], temporary: Path
) -> _RunInputs:
    """Load the case and choose the weights; those of a checkpoint go to `temporary`."""
    weights = _named_weights(options)
    if options.prompts or run is None:
        weights = weights or final_weights(run or Path())
        case = inputs.case_of_prompts(options.prompts, weights.folder)
    else:
        samples = _find_samples(options, run)
        if weights is None and options.step is not None:
            weights = sampling_weights(run, _versions_of(samples), settings, temporary)
        weights = weights or final_weights(run)
        case = inputs.case_of_samples(samples, weights.folder, settings)
    return _RunInputs(run, settings, case, weights)


def _named_weights(options: argparse.Namespace) -> ReplayWeights | None:
    """Return the weights that --model names, if it is given."""
    if not options.model:
        return None
    return ReplayWeights(Path(options.model), f"the weights in {options.model}")


def _find_samples(options: argparse.Namespace, run: Path) -> list[RecordedSample]:
    names = [name.strip() for name in options.samples.split(",")]
    return inputs.find_samples(run, list(filter(None, names)), options.step)


def _versions_of(samples: Sequence[RecordedSample]) -> frozenset[int]:
    """Return the versions of the weights that drew the samples' tokens."""
    return frozenset().union(*(sample.versions for sample in samples))


def _setup(options: argparse.Namespace, loaded: _RunInputs, words: list[str]) -> ReplaySetup:
    device = _device(options)
    dtypes = _dtypes(options, device, loaded.settings)
    notes = _notes(options, loaded, dtypes[0], device)
    left, right = _forward_passes(options, loaded, dtypes, device)
    weights = loaded.weights
    return ReplaySetup(
        loaded.case,
        left,
        right,
        model=str(weights.folder),
        planted=options.plant,
        weights=weights.description,
        drew_samples=weights.drew_samples,
        command=shlex.join(["spmd-rl", "mismatch", *words]),
        run=loaded.run_name,
        notes=notes,
        doubt=_doubt(options, loaded, f"on {device.type} in {_list(*dtypes)}"),
    )


def _notes(
    options: argparse.Namespace, loaded: _RunInputs, dtype: torch.dtype, device: torch.device
) -> tuple[str, ...]:
    """Return sentences on what is replayed; drop attention splits that cannot run here."""
    notes = inputs.tokenizer_notes(loaded.case)
    if options.step is not None:
        notes.append(f"Replayed under {loaded.weights.description}.")
    head_dim = ModelSpec.from_folder(loaded.weights.folder).head_dim
    if drop_splits(loaded.settings, head_dim, dtype, device):
        notes.append(
            "The run's attention_split needs FlashAttention-4: "
            "both sides attend to all keys at once here."
        )
    return tuple(notes)


def _doubt(options: argparse.Namespace, loaded: _RunInputs, where: str) -> str:
    """Return what speaks against an agreement: the mismatches that the run itself counted."""
    if loaded.run is None or options.prompts or "transformers" in (options.left, options.right):
        return ""
    counts = inputs.mismatched_tokens(loaded.run)
    if not counts:
        return ""
    return (
        f"But the run itself counted {sum(counts.values()):,} unequal tokens: "
        f"{inputs.list_by_step(counts)}. "
        f"{len(loaded.case.sequences):,} of its samples were replayed here, in another process, "
        f"{where} under {loaded.weights.description}. The unequal tokens may be of other samples "
        "(--step, --samples); if not, what differs from the run in these, or a push, is to blame."
    )


def _list(*dtypes: torch.dtype) -> str:
    return " and ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _device(options: argparse.Namespace) -> torch.device:
    return torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _dtypes(
    options: argparse.Namespace, device: torch.device, settings: dict[str, Any]
) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of the left and of the right side."""
    left, right, asked = options.left, options.right, options.dtype
    return (
        _dtype(left, right, asked, device, settings),
        _dtype(right, left, asked, device, settings),
    )


def _dtype(
    name: str, other: str, asked: str | None, device: torch.device, settings: dict[str, Any]
) -> torch.dtype:
    """Return the dtype of the role in the run; `transformers` has that of the other side."""
    role = other if name == "transformers" else name
    dtype_name = asked or settings.get(role, {}).get("dtype", "auto")
    dtype: torch.dtype = getattr(torch, dtype_of(dtype_name, device))
    return dtype


def _forward_passes(
    options: argparse.Namespace,
    loaded: _RunInputs,
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
) -> tuple[ForwardPass, ForwardPass]:
    """Return the left and the right pass, with the fault that the options plant."""
    left, right = (
        _forward_pass(name, loaded.weights.folder, dtype, device, loaded.settings)
        for name, dtype in zip((options.left, options.right), dtypes, strict=True)
    )
    if options.plant:
        assert isinstance(left, EnginePass)
        plant(options.plant, left)
    return left, right


def _forward_pass(
    name: str, model: Path, dtype: torch.dtype, device: torch.device, settings: dict[str, Any]
) -> ForwardPass:
    if name == "transformers":
        return ReferencePass(model, dtype, device)
    engine, trainer = settings.get("engine", {}), settings.get("trainer", {})
    trainer = trainer | trainer.get("backend", {})
    network = load_model(model, dtype, device)
    if name == "engine":
        return EnginePass(
            network,
            NativeEngineConfig(**{key: engine[key] for key in ENGINE_KEYS if key in engine}),
        )
    return TrainerPass(network, **{key: trainer[key] for key in TRAINER_KEYS if key in trainer})


def _parser() -> _MismatchParser:
    parser = _MismatchParser(prog="spmd-rl mismatch", description=main.__doc__, allow_abbrev=False)
    parser.add_argument("run", nargs="?", help="folder of a run, with samples/ and hf/")
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="samples of this step, and the weights that drew them, if a checkpoint has them",
    )
    parser.add_argument(
        "--samples",
        default="",
        metavar="UID:INDEX,...",
        help="default: one of each of the last step's first 8 prompts",
    )
    parser.add_argument("--left", choices=PASSES, default="engine")
    parser.add_argument("--right", choices=PASSES, default="trainer")
    parser.add_argument(
        "--model", metavar="PATH", help="a Hugging Face folder; default: the run's hf/"
    )
    parser.add_argument(
        "--prompts", nargs="+", metavar="TEXT", help="replay these texts instead of samples"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="default: each role's in the run, or bfloat16 on GPUs",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    parser.add_argument("--plant", choices=tuple(FAULTS), help="plant a fault in the engine")
    parser.add_argument("--out", metavar="DIR", help="default: RUN/mismatch")
    return parser
