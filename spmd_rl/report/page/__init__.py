"""The report page: markup, style, scripts and data in one file.

The text of a model is hostile input. It enters the page as JSON in which no character can open or
close a tag, and the scripts show it as text only. A content security policy allows no other script
and no network access.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib import resources
from typing import Any

_SCRIPTS = (
    "dom.js",
    "series.js",
    "axis.js",
    "view.js",
    "chart.js",
    "panels.js",
    "timeline.js",
    "samples.js",
    "tables.js",
    "changes.js",
    "app.js",
)


def render(data: dict[str, Any]) -> str:
    """Return the page for the data of `build.gather`."""
    style, script = _text("style.css"), _script()
    parts = {
        "title": html.escape(data["title"]),
        "style": style,
        "style_hash": policy_hash(style),
        "script": script,
        "script_hash": policy_hash(script),
        "data": as_json(data),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _text("page.html"))


def as_json(data: Any) -> str:
    """Return JSON that is safe inside a script element: ASCII without markup characters."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _script() -> str:
    return '"use strict";\n(() => {\n' + "\n".join(map(_text, _SCRIPTS)) + "})();\n"


def policy_hash(content: str) -> str:
    """Return the hash by which a content security policy allows `content`."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def _text(name: str) -> str:
    return (resources.files(__name__) / name).read_text(encoding="utf-8")
