"""Disk cache of compiled CuTe DSL kernels, keyed by a digest of their sources."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import quack.cache

# The package's default is a folder of /tmp, which another user could create first, and from which
# code would be loaded.
quack.cache.CACHE_DIR = quack.cache.CACHE_DIR or str(Path.home() / ".cache" / "quack")
quack.cache.EXTRA_SOURCE_DIRS += sorted(
    room for room in Path(__file__).parents[1].iterdir() if room.is_dir()
)
if (flash := find_spec("flash_attn")) is not None:
    quack.cache.EXTRA_SOURCE_DIRS += [
        Path(root) / "cute" for root in flash.submodule_search_locations or ()
    ]

cached_on_disk = quack.cache.jit_cache  # keyed by the compiling function's name and its arguments
