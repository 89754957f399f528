"""Settings that save memory on a GPU, in the order of what they cost.

First come layouts: engines that share their experts or their matrices over several ranks, and a
trainer that divides its experts, its sequences, its matrices, or the last two. The native engine
goes before SGLang, whose log-probs have other bits. Within a layout, settings of the trainer follow
by their cost in speed. What a recipe does not have, or what does not go with another setting, is
refused when it is tried.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, product

Flags = tuple[str, ...]
LEAST_MICRO_BATCH = 4096  # tokens; a smaller one makes matrices too small to be computed fast
ALL = "--trainer.backend.recompute=all"
FULL = tuple(
    f"--trainer.backend.model_options.recompute_{name}"
    for name in ("granularity=full", "method=uniform", "num_layers=1")
)
MOMENTS, MASTER = (f"--trainer.backend.offload={what}" for what in ("moments", "master"))
ACTIVATIONS = "--trainer.backend.offload_activations=true"
MICRO_BATCH = "--trainer.max_tokens={}"
SAVERS: tuple[Flags, ...] = (
    (),
    ("--trainer.backend.recompute=cheap",),
    (ALL,),
    (ALL, "--trainer.backend.wrap=layer"),
    FULL,
    (MOMENTS, ALL),
    (MOMENTS, *FULL),
    (MASTER, ALL),
    (MASTER, ALL, ACTIVATIONS),
    (MICRO_BATCH, ALL),
    (MICRO_BATCH, *FULL),
    (MICRO_BATCH, MOMENTS, ALL),
    (MICRO_BATCH, MOMENTS, *FULL),
    (MICRO_BATCH, MASTER, ALL, ACTIVATIONS),
)
SEQUENCES, MATRICES = "split.train.cp", "split.train.tp"
OTHER_BITS = "--run.exact=false"
EXPERT_SIZES = (2, 4, 8, 16, 32, 64, 128)
MATRIX_SIZES = (2, 4, 8)  # ranks of one host


def layouts(kept: Collection[str], world_size: int) -> list[Flags]:
    """Return the layouts of a world, without settings in `kept`, which the run itself has set.

    The first is that of the run as it is.
    """
    return _without(kept, _layouts(world_size))


def savers(kept: Collection[str], micro_batch: int) -> list[Flags]:
    """Return the settings of the trainer to try in a layout, without those in `kept`.

    `micro_batch` is the least size of one, in tokens; 0: the run's own stays.
    """
    usable = (one for one in SAVERS if micro_batch or MICRO_BATCH not in one)
    return _without(kept, (tuple(flag.format(micro_batch) for flag in one) for one in usable))


def _without(kept: Collection[str], all_flags: Iterable[Flags]) -> list[Flags]:
    """Return each of the flags once, without settings in `kept`."""
    free = (tuple(flag for flag in flags if key_of(flag) not in kept) for flags in all_flags)
    return list(dict.fromkeys(free))


def key_of(flag: str) -> str:
    """Return the key of a setting that is written `--a.b=c` or `a.b=c`."""
    return flag.removeprefix("--").partition("=")[0]


def _layouts(world_size: int) -> Iterator[Flags]:
    """Yield the layouts of a world: all ranks with all of the model, then cut along some axes."""
    engines: list[Flags] = [()]
    parts = [size for size in EXPERT_SIZES if world_size % size == 0]
    exact: list[Flags] = [(), *((f"--split.train.ep={size}",) for size in parts)]
    inexact: list[Flags] = []
    sizes = [size for size in MATRIX_SIZES if world_size % size == 0]
    sharing = [(f"--{SEQUENCES}={size}",) for size in sizes]
    matrices = {size: (f"--{MATRICES}={size}",) for size in sizes}
    both = {size: _with_sequences(size, sizes, world_size) for size in sizes}
    exact += sharing
    for size in sizes:
        engines.append(("--engine.kind=sglang", OTHER_BITS, f"--split.infer.tp={size}"))
        sequence = "--trainer.backend.sequence_parallel=true"
        inexact.append((*matrices[size], sequence, OTHER_BITS))
    cut = [*matrices.values(), *chain.from_iterable(both.values())]
    yield from _product_of(engines[:1], [*exact, *cut, *inexact])
    for size in parts:  # native engines share experts, and then the trainer too
        yield (f"--split.infer.ep={size}",)
        yield f"--split.infer.ep={size}", f"--split.train.ep={size}"
    for size in sizes:  # native engines share matrices
        trainers = [(), *sharing, matrices[size], *both[size]]
        yield from _product_of([(f"--split.infer.tp={size}",)], trainers)
    yield from _product_of(engines[1:], [*exact, *inexact])


def _with_sequences(tp: int, sizes: Sequence[int], world_size: int) -> list[Flags]:
    """Return the layouts of a trainer whose ranks share matrices, `tp` each, and sequences."""
    fitting = (cp for cp in sizes if world_size % (cp * tp) == 0)
    return [(f"--{SEQUENCES}={cp}", f"--{MATRICES}={tp}") for cp in fitting]


def _product_of(engines: Iterable[Flags], trainers: Sequence[Flags]) -> Iterator[Flags]:
    """Yield each engine's flags with each trainer's."""
    for engine, trainer in product(engines, trainers):
        yield tuple(dict.fromkeys((*engine, *trainer)))
