"""`spmd-rl mismatch`: replay, compare, say what was found, and leave a page and a JSON."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path as Folder
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import torch

from spmd_rl.errors import ConfigError
from spmd_rl.kernels.attention.backend import attention_backend
from spmd_rl.kernels.contract import dtype_of
from spmd_rl.microscope.diagnose.faults import FAULTS, plant
from spmd_rl.microscope.page.report import Replay, examine, write
from spmd_rl.microscope.replay import inputs, weights
from spmd_rl.microscope.replay.case import Case
from spmd_rl.microscope.replay.engine_pass import EnginePass
from spmd_rl.microscope.replay.forward_pass import Path, ReferencePass, TrainerPass, load_model
from spmd_rl.microscope.replay.weights import Weights
from spmd_rl.model.spec import ModelSpec
from spmd_rl.observe.run_folder import refuse_links
from spmd_rl.rollout.engine import NativeEngineConfig

PATHS = ("engine", "trainer", "transformers")
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
AGREE, PART = 0, 1


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"spmd-rl mismatch: {message}")


def main(words: list[str]) -> int:
    """`spmd-rl mismatch`: exit code 0 when all bits agree, every sequence reads its own history and
    nothing is NaN, 1 when not, 2 for bad input, 3 when it could not be found out."""
    options = _parser().parse_args(words)
    _refuse(options)
    run = Folder(options.run) if options.run else None
    settings = inputs.run_settings(run) if run else {}
    if run and not options.out:
        refuse_links(run)
    with TemporaryDirectory() as temporary:
        case, under = _case(options, run, settings, Folder(temporary) / "model")
        out = _folder(Folder(options.out) if options.out else (run or Folder()) / "mismatch")
        replay = _replay(
            options, run, settings, case, under, shlex.join(["spmd-rl", "mismatch", *words])
        )
        for note in replay.notes:
            print(note)
        found = examine(replay)
        page = write(found, out)
    print(found.verdict)
    print(page)
    return AGREE if found.comparison.agree else PART


def drop_splits(
    settings: dict[str, Any], head_dim: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Take attention in splits out of a run's settings where it cannot run; returns whether there
    was any.
    """
    if attention_backend(head_dim, dtype, device).has_splits:
        return False
    dropped = [
        role.pop(SPLIT, 0) for role in (settings.get("engine", {}), settings.get("trainer", {}))
    ]
    return any(dropped)


def _refuse(options: argparse.Namespace) -> None:
    """What makes no sense together."""
    if options.left == options.right:
        raise ConfigError(f"both paths are '{options.left}': choose two different ones")
    if options.plant and options.left != "engine":
        raise ConfigError("a fault is planted in the engine's path: say --left engine")
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


def _folder(path: Folder) -> Folder:
    """Made before the work is done. Raises: ConfigError where nothing can be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be made: {error.strerror}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"nothing can be written to {path}")
    return path


def _case(
    options: argparse.Namespace, run: Folder | None, settings: dict[str, Any], temporary: Folder
) -> tuple[Case, Weights]:
    """What is replayed, and under which weights; `temporary` is where those of a checkpoint go."""
    named = (
        Weights(Folder(options.model), f"the weights in {options.model}") if options.model else None
    )
    if options.prompts or run is None:
        under = named or weights.of_run(run or Folder())
        return inputs.prompts_given(options.prompts, under.folder), under
    wanted = [name for one in options.samples.split(",") if (name := one.strip())]
    samples = inputs.samples_of(run, wanted, options.step)
    if named is None and options.step is not None:
        versions = frozenset().union(*(one.versions for one in samples))
        named = weights.of_version(run, versions, settings, temporary)
    under = named or weights.of_run(run)
    return inputs.as_case(samples, under.folder, settings), under


def _replay(
    options: argparse.Namespace,
    run: Folder | None,
    settings: dict[str, Any],
    case: Case,
    under: Weights,
    command: str,
) -> Replay:
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    names, notes = (options.left, options.right), inputs.not_as_given(case)
    dtypes = {
        name: _dtype(name, other, options.dtype, device, settings)
        for name, other in zip(names, names[::-1], strict=True)
    }
    counted = (
        inputs.mismatched_tokens(run)
        if run and not options.prompts and "transformers" not in names
        else {}
    )
    types = " and ".join(
        dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes.values())
    )
    if options.step is not None:
        notes.append(f"Replayed under {under.says}.")
    if drop_splits(
        settings, ModelSpec.from_folder(under.folder).head_dim, dtypes[options.left], device
    ):
        notes.append(
            "The run's attention_split needs FlashAttention-4: both paths attend to all keys at once here."
        )
    left, right = (_path(name, under.folder, dtypes[name], device, settings) for name in names)
    if options.plant:
        assert isinstance(left, EnginePass)
        plant(options.plant, left)
    return Replay(
        case,
        left,
        right,
        model=str(under.folder),
        planted=options.plant,
        weights=under.says,
        drew=under.drew,
        command=command,
        run=str(settings.get("run", {}).get("name") or (run or Folder()).name),
        notes=tuple(notes),
        doubt=_doubt(
            counted, len(case.sequences), f"on {device.type} in {types} under {under.says}"
        ),
    )


def _doubt(counted: dict[int, int], num_samples: int, where: str) -> str:
    """What speaks against an agreement: what the run itself counted."""
    if not counted:
        return ""
    return (
        f"But the run itself counted {sum(counted.values()):,} unequal tokens: {inputs.by_step(counted)}. "
        f"{num_samples:,} of its samples were replayed here, in another process, {where}. The unequal tokens may be "
        "of other samples (--step, --samples); if not, what differs from the run in these, or a push, is to blame."
    )


def _dtype(
    name: str, other: str, asked: str | None, device: torch.device, settings: dict[str, Any]
) -> torch.dtype:
    """That of the role in the run; `transformers` takes that of the other side."""
    role = other if name == "transformers" else name
    dtype: torch.dtype = getattr(
        torch, dtype_of(asked or settings.get(role, {}).get("dtype", "auto"), device)
    )
    return dtype


def _path(
    name: str, model: Folder, dtype: torch.dtype, device: torch.device, settings: dict[str, Any]
) -> Path:
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


def _parser() -> _Parser:
    parser = _Parser(prog="spmd-rl mismatch", description=main.__doc__, allow_abbrev=False)
    parser.add_argument("run", nargs="?", help="folder of a run, with samples/ and hf/")
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="samples of this step, and the weights that drew them, if a checkpoint has",
    )
    parser.add_argument(
        "--samples",
        default="",
        metavar="UID:INDEX,...",
        help="default: one of each of the last step's first 8 prompts",
    )
    parser.add_argument("--left", choices=PATHS, default="engine")
    parser.add_argument("--right", choices=PATHS, default="trainer")
    parser.add_argument(
        "--model", metavar="PATH", help="a Hugging Face folder; default: the run's hf/"
    )
    parser.add_argument(
        "--prompts", nargs="+", metavar="TEXT", help="replay these instead of samples"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="default: each role's in the run, or bfloat16 on GPUs",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: a GPU where there is one"
    )
    parser.add_argument("--plant", choices=tuple(FAULTS), help="plant a fault in the engine's path")
    parser.add_argument("--out", metavar="DIR", help="default: RUN/mismatch")
    return parser
