"""What a terminal of some width shows of a stream of text: as much of one as a live view and plain
lines need.
"""

from __future__ import annotations

import re

_PIECE = re.compile(
    r"\x1b\[(?P<number>\d*)(?P<up>A)|\x1b\[(?P<erase>2K)|\x1b\[[?\d;]*[a-zA-Z]|(?P<text>.)",
    re.DOTALL,
)


def screen(stream: str, width: int) -> list[str]:
    """Its lines, from the first that was ever written. A line that is full wraps when one more
    character comes.
    """
    lines, row, column = [""], 0, 0
    for piece in _PIECE.finditer(stream):
        text = piece["text"]
        if piece["up"]:
            row = max(0, row - int(piece["number"] or 1))
        elif piece["erase"]:
            lines[row] = ""
        elif text == "\r":
            column = 0
        elif text == "\n" or (text and column == width):
            row, column = row + 1, 0 if text != "\n" else column
            lines += [""] * (row + 1 - len(lines))
        if text and text not in "\r\n":
            line = lines[row].ljust(column)
            lines[row] = line[:column] + text + line[column + 1 :]
            column += 1
    return lines
