"""Reference network of `transformers`, with which ours is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from spmd_rl.errors import ConfigError

ATTENTION = "sdpa"


def reference_model(folder: str | Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Load `transformers`' own network and the folder's weights.

    Raises: ConfigError when it does not load.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=dtype,
            attn_implementation=ATTENTION,
            trust_remote_code=False,
            local_files_only=True,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"transformers does not load {folder}: {error}") from None
    return model.to(device).requires_grad_(False)


@contextmanager
def attention_through(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """While open, make `transformers` call `wrap(its attention function)`.

    The function is called with (module, query, key, value, mask, ...), heads before tokens, and
    returns (output, weights), tokens before heads.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    plain = ALL_ATTENTION_FUNCTIONS[ATTENTION]
    ALL_ATTENTION_FUNCTIONS[ATTENTION] = wrap(plain)
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS[ATTENTION] = plain
