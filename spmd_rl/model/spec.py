"""Specification of a model: the sizes of the whole, and its blocks. It knows no family."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import groupby
from typing import Literal

from spmd_rl.model.layers.block import BlockSpec
from spmd_rl.model.layers.gqa import Gqa
from spmd_rl.model.layers.layer import Cut, LayerSpec, TensorSpec, num_elements
from spmd_rl.model.layers.mla import Mla
from spmd_rl.model.rope_spec import RopeSpec

# fields on which no bit of a forward pass depends, once the rotary table is given
NOT_ARITHMETIC = {"family", "rope", "eos_ids", "init_std", "unused", "folder_prefix"}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NORM = "model.norm.weight"
VALUE_HEAD = "score.weight"  # the name that transformers gives it
Head = Literal["lm", "value"]  # what a model computes of its hidden states: logits, or a number


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer; `family` is the model_type of its folder.

    Its folder may hold tensors that the network lacks; their names begin as `unused` says. Where
    the network is a part of the folder's, `folder_prefix` stands for the `model.` of names. A run
    chooses `row_shards`: in how many parts row-parallel products are summed, which is the most
    ranks that share the model in its trainer or one of its engines.
    """

    family: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    rms_eps: float
    rope: RopeSpec
    tie_embeddings: bool
    blocks: tuple[BlockSpec, ...]
    eos_ids: tuple[int, ...] = ()
    init_std: float = 0.02
    unused: tuple[str, ...] = ()
    folder_prefix: str = ""
    row_shards: int = 1

    @property
    def impl(self) -> str:
        """Whose network computes the model: "native" is ours."""
        return "native"

    @property
    def num_layers(self) -> int:
        return len(self.blocks)

    @property
    def zero_centred(self) -> bool:
        """Whether one is added to the weights of norms."""
        return any(block.zero_centred for block in self.blocks)

    @property
    def arithmetic(self) -> str:
        """All that a forward pass depends on beside weights and rotary table, as text.

        For example `vocab_size=104, hidden_size=64, ..., blocks=28 x BlockSpec(...)`.
        """
        names = [one.name for one in fields(self) if one.name not in NOT_ARITHMETIC | {"blocks"}]
        sizes = [f"{name}={getattr(self, name)}" for name in names]
        blocks = (f"{len(list(equal))} x {block}" for block, equal in groupby(self.blocks))
        return ", ".join([*sizes, f"blocks={' + '.join(blocks)}"])

    @property
    def num_parameters(self) -> int:
        """Number of parameters, with a tied head counted once."""
        of_blocks = sum(
            count * block.cost().parameters for block, count in Counter(self.blocks).items()
        )
        return of_blocks + num_elements(self.outer_parameters())

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters that a token takes: of the experts, those of the chosen ones."""
        return self.num_parameters - sum(block.cost().idle for block in self.blocks)

    @property
    def flops_per_token(self) -> int:
        """Operations of a forward pass for a token, but for those of attention to other tokens."""
        multiplied = sum(block.cost().multiplied for block in self.blocks)
        return 2 * (multiplied + self.vocab_size * self.hidden_size)

    @property
    def has_states(self) -> bool:
        """Whether layers hand states of sequences on."""
        return self.state_bytes(1) > 0

    @property
    def has_expert_biases(self) -> bool:
        """Whether products of experts have biases, which neither adapters nor ranks share."""
        parameters = (one for block in self.distinct_blocks() for one in block.parameters())
        return any(one.expert is not None and one.name.endswith(".bias") for one in parameters)

    @property
    def whole_layers(self) -> str:
        """In words, the layers that ranks do not share and that other libraries do not run here; ""
        for none.
        """
        if self.has_states:
            return "layers that hand on a state of each sequence"
        layers = [one for block in self.distinct_blocks() for one in block.layers]
        if any(isinstance(one, Mla) for one in layers):
            return "attention to latents"
        if any(isinstance(one, Gqa) and (one.window or one.has_sinks) for one in layers):
            return "attention in windows or with sinks"
        return ""

    def state_bytes(self, element_bytes: int) -> int:
        """Return the bytes of a sequence's states in all layers, of passes with such elements."""
        counts = Counter(block.cache() for block in self.blocks)
        return sum(n * one.state_bytes(element_bytes) for one, n in counts.items() if one)

    def parameters(self, head: Head = "lm") -> Iterator[TensorSpec]:
        """Yield every parameter in the network's order, by its name in a Hugging Face folder."""
        yield from _parameters(self, head)

    def outer_parameters(self, head: Head = "lm") -> list[TensorSpec]:
        """Return the parameters that belong to no block: of the embedding, a norm and the head."""
        vocabulary = self.vocab_size, self.hidden_size
        rows = Cut(0, self.vocab_size, "tokens of the vocabulary", is_padded=True)
        norm = TensorSpec(NORM, (self.hidden_size,), start=1.0 - self.zero_centred)
        outer = [TensorSpec(EMBEDDING, vocabulary, rows), norm]
        if head == "value":
            outer.append(TensorSpec(VALUE_HEAD, (1, self.hidden_size)))
        elif not self.tie_embeddings:
            outer.append(TensorSpec(HEAD, vocabulary, rows))
        return outer

    def parameter_shapes(self, head: Head = "lm") -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter by name, in the network's order."""
        embedding, *others = self.outer_parameters(head)
        shapes = {embedding.name: embedding.shape}
        for number, block in enumerate(self.blocks):
            prefix = block_prefix(number)
            shapes |= {prefix + one.name: one.shape for one in block.parameters()}
        return shapes | {one.name: one.shape for one in others}

    def fixed_names(self) -> frozenset[str]:
        """Return the names of the parameters that no optimizer changes, which are float32."""
        fixed = {
            block: [one.name for one in block.parameters() if one.is_fixed]
            for block in self.distinct_blocks()
        }
        return frozenset(
            block_prefix(number) + name
            for number, block in enumerate(self.blocks)
            for name in fixed[block]
        )

    def expert_parts(self, num_parts: int) -> dict[str, int]:
        """Return of each parameter of an expert the part that has it, by name.

        Each of `num_parts` parts has equally many experts of a layer, one after the other.
        """
        found = {}
        for number, block in enumerate(self.blocks):
            of_experts = [one for one in block.parameters() if one.expert is not None]
            count = len({one.expert for one in of_experts})
            for one in of_experts:
                assert one.expert is not None
                found[block_prefix(number) + one.name] = one.expert * num_parts // count
        return found

    def trainable_shapes(self, head: Head = "lm") -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter that an optimizer may change, by name."""
        fixed = self.fixed_names()
        shapes = self.parameter_shapes(head)
        return {name: shape for name, shape in shapes.items() if name not in fixed}

    def distinct_blocks(self) -> list[BlockSpec]:
        """Return the blocks that differ from each other, in their order."""
        return list(dict.fromkeys(self.blocks))

    def distinct_layers(self) -> list[LayerSpec]:
        """Return the layers that differ from each other, in the network's order."""
        return list(dict.fromkeys(one for block in self.distinct_blocks() for one in block.layers))

    def distinct_tensors(self) -> list[TensorSpec]:
        """Return the tensors of the blocks that differ from each other, by name within a block."""
        return [one for block in self.distinct_blocks() for one in block.parameters()]

    @property
    def num_experts(self) -> int:
        """Number of experts of the largest mixture; 0 for a dense model."""
        tensors = self.distinct_tensors()
        return max((1 + one.expert for one in tensors if one.expert is not None), default=0)


def block_prefix(number: int) -> str:
    """Return how the names of all parameters of block `number` begin."""
    return f"model.layers.{number}."


@lru_cache(maxsize=4)  # a mixture has tens of thousands, and a plan asks again for each layout
def _parameters(spec: ModelSpec, head: Head) -> tuple[TensorSpec, ...]:
    embedding, *others = spec.outer_parameters(head)
    of_blocks = (
        replace(one, name=block_prefix(number) + one.name)
        for number, block in enumerate(spec.blocks)
        for one in block.parameters()
    )
    return (embedding, *of_blocks, *others)
