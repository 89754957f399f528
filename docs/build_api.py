"""API reference of the public names, as HTML.

    python -m docs.build_api build/api

pdoc shows what `spmd_rl/__init__.pyi` exports. Two things it cannot see are added here: the
signatures of endpoints, and the comments of config fields, which `--help-all` shows.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path

import spmd_rl
from spmd_rl.config.describe import describe
from spmd_rl.controller.endpoint import Role, endpoints


def public_classes() -> Iterator[type]:
    values = (getattr(spmd_rl, name) for name in spmd_rl.__all__)
    return (value for value in values if inspect.isclass(value))


def show_signatures(role: type[Role]) -> None:
    """Put each endpoint's method in its place. Nothing is called in this process afterwards."""
    for name, endpoint in endpoints(role).items():
        setattr(role, name, endpoint.function)


def settings_table(config: type) -> str:
    """Return a table of a config's settings: name, default and comment."""
    rows = [f"| `{key.name}` | `{key.default}` | {key.doc} |" for key in describe(config)]
    return "\n".join(["| setting | default | meaning |", "| --- | --- | --- |", *rows])


def show_settings(config: type) -> None:
    """Add the table of its settings to the docstring of a config class."""
    intro = config.__doc__ or ""
    if intro.startswith(f"{config.__name__}("):  # made by dataclasses
        intro = ""
    config.__doc__ = f"{inspect.cleandoc(intro)}\n\n{settings_table(config)}"


def main(target: str) -> None:
    import pdoc

    for found in public_classes():
        if issubclass(found, Role):
            show_signatures(found)
        elif is_dataclass(found) and found.__name__.endswith("Config"):
            show_settings(found)
    pdoc.render.configure(docformat="markdown", show_source=False)
    pdoc.pdoc("spmd_rl", output_directory=Path(target))


if __name__ == "__main__":
    main(*sys.argv[1:])
