"""Text documents for continued pre-training, cut into sequences of which every token is learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spmd_rl.config.rules import at_least
from spmd_rl.data.files.files import open_documents
from spmd_rl.data.files.record import DataRecord
from spmd_rl.data.files.record_store import Preparer
from spmd_rl.data.render.tokenizer import Tokenizer, beginning, begun_once
from spmd_rl.data.sft import learned_eos
from spmd_rl.data.stream import RecordStream
from spmd_rl.errors import ConfigError
from spmd_rl.types.sft_pair import SftPair


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


class Document(NamedTuple):
    """A text, and the name of the file that it is from."""

    text: str
    source: str


class DocumentPreparer(Preparer[Document]):
    """Makes a document of each record, but for those without text."""

    noun = "documents"
    defect = "have no text"

    def __init__(self, cfg: DocumentConfig) -> None:
        self._key = cfg.text_key

    def make(self, records: Sequence[DataRecord], source: str) -> list[Document | None]:
        """Return the document of each record; None for one without text. Raises: DataError."""
        texts = [record.text(self._key) for record in records]
        return [Document(text, source) if text.strip() else None for text in texts]

    def encoded(self, prepared: Document) -> bytes:
        """Return the text."""
        encoded = prepared.text.encode()
        return len(encoded).to_bytes(8, "little") + encoded


class Documents(RecordStream[Document]):
    """An endless stream of text documents, each with an end-of-text token at its end.

    `data` is a file, or a mixture as in `RecordStream`. `next` fills a step to an exact number of
    tokens, and the next step goes on where it ended. Sequences never attend to each other, so
    neither do documents. A document is cut where it is longer than `cfg.max_tokens`, and where a
    step ends. The piece after a cut begins with the token before it, so that every token but a
    document's first is learned exactly once.

    `num_drawn` counts the draws of documents. `num_dropped` counts those without text.
    Documents are tokenised when they are drawn.
    Raises: as `RecordStream`.
    """

    def __init__(
        self, data: str | Mapping[str, float], cfg: DocumentConfig, tokenizer: Tokenizer
    ) -> None:
        check_length(cfg, tokenizer.context)
        super().__init__(
            data,
            DocumentPreparer(cfg),
            seed=cfg.seed,
            shuffle=cfg.shuffle,
            open_file=partial(open_documents, key=cfg.text_key, separator=cfg.separator),
        )
        self._max_tokens = cfg.max_tokens
        self._tokenizer = tokenizer
        self._eos = learned_eos(tokenizer)
        self._beginning = beginning(tokenizer)
        # the document that is being read: its tokens, its source, and the position in it: the
        # tokens before are in earlier sequences
        self._document, self._source = np.zeros(0, np.int32), ""
        self._position = 0

    @property
    def epoch(self) -> float:
        """How often the whole data was drawn so far."""
        return self.num_drawn / len(self)

    def next(self, num_tokens: int) -> list[SftPair]:
        """Return sequences with `num_tokens` tokens, without the tokens that pieces repeat.

        Their masks are true but for a first token, which nothing before it predicts.
        """
        pieces = []
        while num_tokens:
            if self._position == len(self._document):
                self._draw()
            piece, num_new = self._cut(num_tokens)
            pieces.append(piece)
            num_tokens -= num_new
        return pieces

    def one_pass(self) -> list[SftPair]:
        """Return all documents once, in the order of the files, each cut where it is longer than
        `cfg.max_tokens`. They must fit into memory, and nothing may have been drawn yet.
        """
        pieces = []
        for document in self.all():
            self._begin(document)
            while self._position < len(self._document):
                pieces.append(self._cut(self._max_tokens)[0])
        return pieces

    def count_tokens(self) -> int:
        """Return the tokens of a pass over all documents. It tokenises them all."""
        return sum(len(self._tokens(document)) for document in self.all())

    def skip(self, num_tokens: int) -> None:
        """Go on as after `next(num_tokens)`. It tokenises what it skips."""
        self.next(num_tokens)

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, as plain data."""
        place = {"position": self._position, "length": len(self._document)}
        return super().state() | place

    def restore(self, state: dict[str, Any]) -> None:
        """Continue within the document that was being read when `state` was taken.

        Raises: DataError when documents or tokenizer are not the same.
        """
        super().restore(state)
        if self.num_drawn:
            self.num_drawn -= 1
            self._draw()
        if state["length"] != len(self._document):
            raise self.changed()
        if type(state["position"]) is not int or not 0 <= state["position"] <= state["length"]:
            raise ValueError(f"'position' is {state['position']!r}")
        self._position = state["position"]

    def _draw(self) -> None:
        """Begin the next document."""
        (document,) = self.draw(1)
        self._begin(document)

    def _begin(self, document: Document) -> None:
        self._document = self._tokens(document)
        self._source, self._position = document.source, 0

    def _tokens(self, document: Document) -> NDArray[np.int32]:
        """Return the tokens of a document, with a first one if the tokenizer has one."""
        (encoded,) = self._tokenizer([document.text], add_special_tokens=True)["input_ids"]
        tokens = begun_once(encoded, self._beginning)
        without_end = tokens[:-1] if tokens and tokens[-1] == self._eos else tokens
        return np.array([*without_end, self._eos], np.int32)

    def _cut(self, num_tokens: int) -> tuple[SftPair, int]:
        """Return the next piece of the document, and how many of its tokens no piece before it had.

        These are `num_tokens` at most. All tokens but the piece's first are learned.
        """
        repeated = 1 if self._position else 0
        num_new = min(num_tokens, self._max_tokens - repeated, len(self._document) - self._position)
        start, self._position = self._position, self._position + num_new
        tokens = self._document[start - repeated : self._position]
        return SftPair(tokens, np.arange(len(tokens)) > 0, self._source), num_new


def check_length(cfg: DocumentConfig, context: int) -> None:
    """Raises: ConfigError when sequences of that length do not fit the model's context."""
    if cfg.max_tokens > context:
        raise ConfigError(
            f"documents.max_tokens = {cfg.max_tokens} is more than the model's context of "
            f"{context}: lower it"
        )


def check_documents(path: str, cfg: DocumentConfig, context: int, num_bytes: int) -> None:
    """Refuse a file that `Documents` would refuse, by its first bytes.

    Raises: DataError, ConfigError.
    """
    check_length(cfg, context)
    records = open_documents(path, cfg.text_key, cfg.separator)
    for chunk in records.chunks(records.num_within(num_bytes)):
        for record in chunk:
            record.text(cfg.text_key)
