"""Short names of prompts: what the user said, without the tokens of a chat template."""

from __future__ import annotations

import re

MAX_NAME = 60  # characters
_SPECIAL = r"(?:<[|｜/]?[^<>\n]{1,40}>|\[/?INST\])"
# what stands between the marker of a user's turn and the next special token
_USER_TURN = re.compile(
    rf"(?:user(?:[|｜]>|\s|(?:{_SPECIAL})+)|\[INST\])(?P<said>.*?)(?={_SPECIAL})", re.DOTALL | re.I
)


def prompt_name(prompt: str, question: str = "") -> str:
    """Return what the user said on one line, with its middle left out if it is long.

    A prompt that is no chat has the name of its end.
    """
    said = user_text(prompt, question)
    line, half = " ".join(said.split()), MAX_NAME // 2
    if len(line) <= MAX_NAME:
        return line
    return f"…{line[1 - MAX_NAME :]}" if said is prompt else f"{line[: half - 1]}…{line[-half:]}"


def user_text(prompt: str, question: str = "") -> str:
    """Return the question, the last turn of the user in a text with special tokens, or the prompt.

    Runs before the question was recorded have the text alone.
    """
    turns = [found["said"].strip() for found in _USER_TURN.finditer(prompt)]
    return question.strip() or next((turn for turn in reversed(turns) if turn), prompt)
