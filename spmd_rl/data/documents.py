"""Text documents for continued pre-training, cut into sequences of which every token is learned."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spmd_rl.config.rules import at_least
from spmd_rl.data.epoch_order import EpochOrder
from spmd_rl.data.files import read_documents
from spmd_rl.data.prompt_format import Tokenizer
from spmd_rl.data.sft import learned_eos
from spmd_rl.data.sft_pair import SftPair
from spmd_rl.data.stream import DATA_CHANGED
from spmd_rl.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class DocumentConfig:
    text_key: str = "text"  # of any file but .txt
    # what stands between two documents of a .txt file; "": the file is one document
    separator: str = "\n\n"
    max_tokens: int = 2048  # longer documents are cut into pieces of that length
    shuffle: bool = True  # use a new order every epoch; false: the order of the file
    seed: int = 0  # of the shuffling

    def __post_init__(self) -> None:
        at_least(self, {"max_tokens": 2})


class Documents:
    """An endless stream of text documents, each with an end-of-text token at its end.

    `next` fills a step to an exact number of tokens, and the next step goes on where it ended.
    Sequences never attend to each other, so neither do documents. A document is cut where it is
    longer than `cfg.max_tokens`, and where a step ends. The piece after a cut begins with the
    token before it, so that every token but a document's first is learned exactly once.

    `num_drawn` counts the documents that were begun. `num_dropped` counts those without text.
    Documents are tokenised when they are drawn.
    """

    def __init__(self, path: str, cfg: DocumentConfig, tokenizer: Tokenizer) -> None:
        check_length(cfg, tokenizer.context)
        records = read_documents(path, cfg.text_key, cfg.separator)
        texts = [record.text(cfg.text_key) for record in records]
        self._texts = [text for text in texts if text.strip()]
        self.num_dropped = len(texts) - len(self._texts)
        _report_empty(path, self.num_dropped, len(texts))
        self._path = path
        self._max_tokens = cfg.max_tokens
        self._tokenizer = tokenizer
        self._eos = learned_eos(tokenizer)
        self._order = EpochOrder(len(self._texts), seed=cfg.seed, shuffle=cfg.shuffle)
        self._document = np.zeros(0, np.int32)  # the one that is being read
        self._position = 0  # in it: the tokens before are in earlier sequences

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def num_drawn(self) -> int:
        return self._order.num_drawn

    @property
    def epoch(self) -> float:
        """How often the whole data was drawn so far."""
        return self._order.num_drawn / len(self._texts)

    def next(self, num_tokens: int) -> list[SftPair]:
        """Return sequences with `num_tokens` tokens, without the tokens that pieces repeat.

        Their masks are true but for a first token, which nothing before it predicts.
        """
        pieces = []
        while num_tokens:
            if self._position == len(self._document):
                self._document, self._position = self._draw(), 0
            piece = self._cut(num_tokens)
            pieces.append(_learned(piece.tokens))
            num_tokens -= piece.num_new
        return pieces

    def one_pass(self) -> list[SftPair]:
        """Return all documents once, in the order of the next epoch, each cut where it is longer
        than `cfg.max_tokens`. `next` goes on after them with a new document.
        """
        pieces = []
        for _ in range(len(self)):
            self._document, self._position = self._draw(), 0
            while self._position < len(self._document):
                pieces.append(_learned(self._cut(self._max_tokens).tokens))
        return pieces

    def count_tokens(self) -> int:
        """Return the tokens of a pass over all documents. It tokenises them all."""
        return sum(len(self._tokens(number)) for number in range(len(self._texts)))

    def skip(self, num_tokens: int) -> None:
        """Go on as after `next(num_tokens)`. It tokenises what it skips."""
        self.next(num_tokens)

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, as plain data."""
        return {
            "drawn": self._order.num_drawn,
            "position": self._position,
            "length": len(self._document),
            "digest": self._digest,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue within the document that was being read when `state` was taken.

        Raises: DataError when documents or tokenizer are not the same.
        """
        self._order.num_drawn = max(state["drawn"] - 1, 0)
        self._document = self._draw() if state["drawn"] else self._document
        if state.get("digest") != self._digest or state["length"] != len(self._document):
            raise DataError(self._path, f"the documents are {DATA_CHANGED}")
        self._position = state["position"]

    def _draw(self) -> NDArray[np.int32]:
        """Return the tokens of the next document."""
        return self._tokens(self._order.next())

    def _tokens(self, number: int) -> NDArray[np.int32]:
        """Return the tokens of a document, with a first token if the tokenizer has one."""
        text = self._texts[number]
        (tokens,) = self._tokenizer([text], add_special_tokens=True)["input_ids"]
        without_end = tokens[:-1] if tokens and tokens[-1] == self._eos else tokens
        return np.array([*without_end, self._eos], np.int32)

    def _cut(self, num_tokens: int) -> _Piece:
        """Return the next piece of the document, with at most `num_tokens` new tokens."""
        repeated = 1 if self._position else 0
        num_new = min(num_tokens, self._max_tokens - repeated, len(self._document) - self._position)
        start, self._position = self._position, self._position + num_new
        return _Piece(self._document[start - repeated : self._position], num_new)

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256()
        for text in self._texts:
            encoded = text.encode()
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        return digest.hexdigest()


@dataclass(frozen=True)
class _Piece:
    """A sequence, and how many of its tokens no piece before it had."""

    tokens: NDArray[np.int32]
    num_new: int


def check_length(cfg: DocumentConfig, context: int) -> None:
    """Raises: ConfigError when sequences of that length do not fit the model's context."""
    if cfg.max_tokens > context:
        raise ConfigError(
            f"documents.max_tokens = {cfg.max_tokens} is more than the model's context of "
            f"{context}: lower it"
        )


def check_documents(path: str, cfg: DocumentConfig, context: int) -> None:
    """Refuse a file that `Documents` would refuse. Raises: DataError, ConfigError."""
    check_length(cfg, context)
    records = read_documents(path, cfg.text_key, cfg.separator)
    for record in records:
        record.text(cfg.text_key)


def _learned(tokens: NDArray[np.int32]) -> SftPair:
    """Return a sequence of which all tokens but the first are learned."""
    return SftPair(tokens, np.arange(len(tokens)) > 0)


def _report_empty(path: str, num_empty: int, num_documents: int) -> None:
    """Print how many documents have no text. Raises: DataError when none has."""
    if num_empty == num_documents:
        raise DataError(path, f"none of the {num_documents} documents has text")
    if num_empty:
        print(f"{path}: dropped {num_empty} of {num_documents} documents without text", flush=True)
