"""A small dense retriever: it finds the document whose embedding is nearest to that of a query.

    python -m examples.search.retriever

trains the encoders and writes `runs/search_encoder.npz`. A text is a vector of counts of its letter
trigrams, those of the first word apart from those of the others. Its embedding is a linear map of
that, one for queries and one for documents. They are trained so that of the documents in a batch
the right one is the nearest to its query, as in DPR (Karpukhin et al., 2020). The training speaks
of people who are not in the corpus. Queries and documents use different words for the same.
"""

from __future__ import annotations

import argparse
import json
import random
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from examples.search.generate import facts_by_query, people

CORPUS = Path(__file__).with_name("corpus.jsonl")
ENCODER = Path("runs/search_encoder.npz")
NUM_FEATURES, NUM_DIMENSIONS = 4096, 96
TEMPERATURE = 0.1  # of the similarities in training

Floats = NDArray[np.float32]


def features(texts: Sequence[str]) -> Floats:
    """Return the counts of hashed letter trigrams of each text. Shape: [texts, NUM_FEATURES]."""
    counts = np.zeros((len(texts), NUM_FEATURES), np.float32)
    for row, text in zip(counts, texts, strict=True):
        for number, word in enumerate(text.strip(".").split()):
            padded, place = f" {word} ", "first" if number == 0 else "later"
            for start in range(len(padded) - 2):
                key = f"{place} {padded[start : start + 3]}"
                row[zlib.crc32(key.encode()) % NUM_FEATURES] += 1
    return counts


class Retriever:
    """The documents with their embeddings.

    `weights` are the encoders of queries and of documents. Shape: [2, features, dimensions].
    """

    def __init__(self, weights: Floats, texts: Sequence[str]) -> None:
        self.query_weight, self.document_weight = weights
        self.texts = list(texts)
        self._embeddings = embed(self.texts, self.document_weight)

    @staticmethod
    def load(encoder: Path = ENCODER, corpus: Path = CORPUS) -> Retriever:
        """Return the retriever over the shipped corpus.

        Raises: FileNotFoundError when the encoder was not trained yet.
        """
        if not encoder.exists():
            raise FileNotFoundError(
                f"{encoder} is missing: train it first by `python -m examples.search.retriever`"
            )
        with np.load(encoder, allow_pickle=False) as arrays:
            return Retriever(arrays["weights"], read_corpus(corpus))

    def find(self, query: str) -> str:
        """Return the document nearest to the query."""
        similarities = self._embeddings @ embed([query], self.query_weight)[0]
        return self.texts[int(similarities.argmax())]


def embed(texts: Sequence[str], weight: Floats) -> Floats:
    """Return embeddings of length 1. Shape: [texts, dimensions]."""
    embeddings = features(texts) @ weight
    lengths = np.linalg.norm(embeddings, axis=1, keepdims=True)
    scaled: Floats = embeddings / np.maximum(lengths, 1e-6)
    return scaled


def read_corpus(path: Path = CORPUS) -> list[str]:
    """Return the documents."""
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def train(num_steps: int = 300, batch: int = 256, seed: int = 0) -> Floats:
    """Return the weights of encoders that were trained on pairs of queries and documents."""
    import torch

    rng = random.Random(seed)
    pairs = list(facts_by_query(people(2000, 60, rng), rng).items())
    queries = torch.from_numpy(features([query for query, _ in pairs]))
    documents = torch.from_numpy(features([document for _, document in pairs]))
    generator = torch.Generator().manual_seed(seed)
    shape = 2, NUM_FEATURES, NUM_DIMENSIONS
    weights = torch.randn(shape, generator=generator) / NUM_DIMENSIONS**0.5
    weights.requires_grad_()
    optimizer = torch.optim.Adam([weights], lr=0.01)
    for _ in range(num_steps):
        rows = torch.randperm(len(pairs), generator=generator)[:batch]
        ends = (queries[rows] @ weights[0], documents[rows] @ weights[1])
        asked, found = (torch.nn.functional.normalize(end, dim=1) for end in ends)
        similarities = asked @ found.T / TEMPERATURE
        loss = torch.nn.functional.cross_entropy(similarities, torch.arange(len(rows)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    trained: Floats = weights.detach().numpy()
    return trained


def share_found(retriever: Retriever, queries: dict[str, str]) -> float:
    """Return the share of queries whose document is found."""
    return float(np.mean([retriever.find(query) == text for query, text in queries.items()]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ENCODER)
    args = parser.parse_args()
    weights = train()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez(args.out, weights=weights)
    rng = random.Random(1)
    facts = facts_by_query(people(400, 60, rng), rng)
    share = share_found(Retriever(weights, list(facts.values())), facts)
    print(f"{args.out}: finds the document of {share:.1%} of 800 queries about other people")


if __name__ == "__main__":
    main()
