"""Program that the child's interpreter runs before any child: it prints facts about its SGLang.

    python site_facts.py            prints {"version", "options", "memory_saver"} as JSON

It reads files and imports neither SGLang nor torch, so it answers at once. It needs the standard
library alone.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import re
import sys
from pathlib import Path

SERVER_ARGS = "srt/server_args.py"
HOOK = "torch_memory_saver_hook_mode_preload"


def facts() -> dict[str, object]:
    """Return the version of SGLang, the names of its options, and the library to preload."""
    folder = _package_folder("sglang")
    if folder is None:
        return {"version": "", "options": [], "memory_saver": ""}
    return {
        "version": _version("sglang"),
        "options": _option_names(folder / SERVER_ARGS),
        "memory_saver": _memory_saver_hook(),
    }


def _package_folder(name: str) -> Path | None:
    """Return the folder of a package, which is not imported for that."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _option_names(path: Path) -> list[str]:
    """Return the fields of the class ServerArgs, from its source."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "ServerArgs":
            fields = (item.target for item in node.body if isinstance(item, ast.AnnAssign))
            return [field.id for field in fields if isinstance(field, ast.Name)]
    return []


def _memory_saver_hook() -> str:
    """Return the library that gives memory back, for the CUDA of this torch; "" without either."""
    folder, torch = _package_folder("torch_memory_saver"), _package_folder("torch")
    if folder is None or torch is None:
        return ""
    found = re.search(r"^cuda\b[^=]*=\s*'(\d+)", (torch / "version.py").read_text(), re.MULTILINE)
    if found is None:
        return ""
    libraries = folder.parent.glob(f"{HOOK}_cu{found[1]}*.so")
    return str(next(libraries, ""))


if __name__ == "__main__":
    json.dump(facts(), sys.stdout)
