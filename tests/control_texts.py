"""Texts that command a terminal which shows them as they are."""

COMMANDS = {
    "clears the screen": "\x1b[2J",
    "sets the title": "\x1b]0;owned\x07",
    "answers a question": "\x1b[6n",
    "is a command of eight bits": "\x9b31m",
    "goes back": "ab\x08\x08cd",
    "reverses the text": "\u202e",
    "is half of a character": "\udc9b",
}


def is_harmless(text: str) -> bool:
    """Return whether no terminal takes a part of the text as a command."""
    return all(character.isprintable() or character == "\n" for character in text)
