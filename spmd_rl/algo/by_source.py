"""Measurements by source of the data, where a batch has several. numpy only.

A batch then has a column "source/NAME" for each source: of what is counted, the number in the
batch by that of the source. It is 0 elsewhere. So a measurement times this column has its mean
over the source as its mean over the batch, however the batch is split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

_PREFIX = "source/"


def source_columns(
    sources: Sequence[str], counts: NDArray[np.integer], lengths: NDArray[np.integer]
) -> dict[str, NDArray[np.float32]]:
    """Return the columns of a batch. It has none unless there are several sources.

    Each entry is a sequence or a pair: its source, how much of it is counted, such as its learned
    tokens, and its number of tokens.
    Shape: `counts` and `lengths` are [N]; each column is [T].
    """
    names = [*dict.fromkeys(sources)]
    if len(names) < 2:
        return {}
    of = np.array([names.index(source) for source in sources])
    columns = {}
    for number, name in enumerate(names):
        is_own = of == number
        own = counts[is_own].sum()
        scale = np.where(is_own, counts.sum() / own if own else 0.0, 0.0)
        columns[_PREFIX + (name or "unnamed")] = np.repeat(scale, lengths).astype(np.float32)
    return columns


def by_source(
    columns: Mapping[str, Tensor], share: Tensor, measured: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return measurements as those of each source, under source/NAME/share and source/NAME/KEY.

    `share` and the values of `measured` have means over a batch that the trainer reports. The mean
    of `share` over the batch is 1.
    Shape: `share`, and each value and result, is [M].
    """
    found: dict[str, Any] = {}
    for name, scale in columns.items():
        if name.startswith(_PREFIX):
            found[f"{name}/share"] = share * (scale > 0)
            found |= {f"{name}/{key}": value * scale for key, value in measured.items()}
    return found
