"""The page itself: markup, style and scripts, put into one file together with the data.

What a model wrote is data and stays data. It enters the page as JSON in which no character can open
or close a tag, the scripts put it on the screen as text only, and a content security policy runs no
script but these and reaches no network.
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
    "app.js",
)


def render(data: dict[str, Any]) -> str:
    """The whole page for what `build.gather` gathered."""
    style, script = _text("style.css"), _script()
    parts = {
        "title": html.escape(data["title"]),
        "style": style,
        "style_hash": _hash(style),
        "script": script,
        "script_hash": _hash(script),
        "data": as_json(data),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _text("page.html"))


def as_json(data: Any) -> str:
    """JSON that is safe inside a script element: no markup, no line separators, ASCII only."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _script() -> str:
    return '"use strict";\n(() => {\n' + "\n".join(map(_text, _SCRIPTS)) + "})();\n"


def _hash(content: str) -> str:
    """The name by which a content security policy admits `content`."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def _text(name: str) -> str:
    return (resources.files(__name__) / name).read_text(encoding="utf-8")
