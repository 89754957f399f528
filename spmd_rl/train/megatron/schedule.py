"""Schedule: micro-batches through the stages of a pipeline, and their outputs to every rank.

The last stage computes outputs and losses. The other stages get the outputs when all micro-batches
are done, so that all ranks of a shard know the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.algo.losses import Needs
from spmd_rl.errors import ContractError
from spmd_rl.kernels import PackedAttention, Rotary, TokenAttention
from spmd_rl.kernels.attention.shared_tokens import SharedAttention, SharedTokens
from spmd_rl.kernels.runtime.upload import upload
from spmd_rl.model.held.tensor import ONE, Along
from spmd_rl.model.scorer import CANDIDATES_OF_SETS
from spmd_rl.model.spec import ModelSpec
from spmd_rl.train.backend import Outputs
from spmd_rl.train.megatron.attention import AttentionInputs
from spmd_rl.train.megatron.config import Layers
from spmd_rl.train.megatron.packing import Packed, deal_to_rank, num_padded, pack_for_rank
from spmd_rl.train.megatron.scores import ScoredRows, VocabularyHead
from spmd_rl.train.megatron.sums import SumOver
from spmd_rl.train.microbatch import MicroBatch, without_scores

OnOutputs = Callable[[int, Outputs], Tensor | None]


@dataclass(frozen=True)
class PipelineSchedule:
    """Runs the chunks of this rank over micro-batches. `head` is None before the last stage."""

    spec: ModelSpec
    chunks: Sequence[Any]
    config: Any
    groups: Any
    context: Along
    head: VocabularyHead | None
    rope_tables: tuple[Tensor, Tensor]
    logit_rows: int
    layers: Layers

    def run(
        self, micros: Sequence[MicroBatch], on_outputs: OnOutputs, needs: Needs, backward: bool
    ) -> None:
        """Run all micro-batches, and call `on_outputs` with the outputs of each, on every rank.

        On the last stage it returns the loss, or None without `backward`.
        Ranks: all of the role. Blocks: until each is done.
        """
        results: dict[int, Outputs] = {}
        scheduled = [*micros, *self._padding(micros)]
        least = self._least_tokens(scheduled)

        def forward_step(numbers: Iterator[int], chunk: Any, *_: Any) -> tuple[Tensor, Any]:
            number = next(numbers)
            packed = self._pack(scheduled[number], least)

            def loss(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
                outputs = self._outputs(hidden, scheduled[number], packed, needs)
                assert outputs.logprobs is not None
                found: Tensor | None = outputs.logprobs.sum()  # of padding: 0, with a gradient
                if number < len(micros):
                    results[number] = outputs.detached()
                    found = on_outputs(number, outputs)
                value = hidden.new_zeros(()) if found is None else found
                return value, torch.zeros((), dtype=torch.int64, device=value.device), {}

            return self._forward(chunk, packed), loss

        self._run_pipeline(forward_step, len(scheduled), backward)
        if self.groups.pp.size() > 1:
            self._tell_other_stages(micros, results, on_outputs, needs)

    def _run_pipeline(
        self, forward_step: Callable[..., Any], num_micros: int, backward: bool
    ) -> None:
        """Run Megatron-core's own schedule, which calls `forward_step` for each micro-batch."""
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

        num_stages, num_chunks = self.groups.pp.size(), len(self.chunks)
        iterators = [iter(range(num_micros)) for _ in self.chunks]
        several = num_chunks > 1
        run = get_forward_backward_func(pp_size=num_stages, vp_size=num_chunks if several else None)
        of_pipeline = {"p2p_communicator": P2PCommunicator(self.groups.pp, self.config)}
        run(
            forward_step_func=forward_step,
            data_iterator=iterators if several else iterators[0],
            model=list(self.chunks) if several else self.chunks[0],
            num_microbatches=num_micros,
            seq_length=1,  # stages tell each other the shape of each micro-batch
            micro_batch_size=1,
            forward_only=not backward,
            pg_collection=self.groups,
            **(of_pipeline if num_stages > 1 else {}),
        )

    def _padding(self, micros: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return empty micro-batches that stages which take turns with several chunks need.

        Their number must be a multiple of the stages, and over gloo twice as many at least.
        """
        if len(self.chunks) == 1:
            return []
        num_stages = self.groups.pp.size()
        needed = max(2, -(-len(micros) // num_stages)) * num_stages
        return [without_scores(micros[0])] * (needed - len(micros))

    def _least_tokens(self, micros: Sequence[MicroBatch]) -> int:
        """Return the tokens that every micro-batch is padded to.

        Two stages that take turns send each other two shapes at once, and may take one for the
        other: all must be equal.
        """
        if len(self.chunks) == 1:
            return 0
        context = ONE if self.attends_locally else self.context
        return max(num_padded(micro, context) for micro in micros)

    def _pack(self, micro: MicroBatch, least: int) -> Packed:
        multiple = self.groups.tp.size() if self.config.sequence_parallel else 1
        pack = deal_to_rank if self.attends_locally else pack_for_rank
        return pack(micro, self.context, multiple, least)

    def _forward(self, chunk: Any, packed: Packed) -> Tensor:
        """Return the chunk's output: hidden states [T', 1, C], along tp a part of them."""
        params = self._packed_params(packed)
        params.inputs = AttentionInputs(
            rotary=Rotary(packed.positions, *self.rope_tables),
            attend=self._attention(packed) if self.attends_locally else None,
        )
        hidden: Tensor = chunk(
            input_ids=packed.tokens[None],
            position_ids=packed.positions[None],
            attention_mask=None,
            packed_seq_params=params,
        )
        return hidden

    def _packed_params(self, packed: Packed) -> Any:
        """Return the `PackedSeqParams`; transformer-engine alone reads where sequences end."""
        from megatron.core.packed_seq_params import PackedSeqParams

        if self.layers == "local":
            return PackedSeqParams(qkv_format="thd")
        ends = np.cumsum(np.append(0, packed.lengths), dtype=np.int32)
        offsets = upload(ends, packed.tokens.device)
        longest = int(packed.lengths.max())
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )

    @property
    def attends_locally(self) -> bool:
        """Whether our kernels attend. Along cp, a rank then has tokens of all sequences in turn."""
        return self.layers == "local"

    def _attention(self, packed: Packed) -> TokenAttention:
        whole = PackedAttention(
            packed.lengths,
            device=packed.tokens.device,
            prefixes=packed.prefixes,
        )
        if self.context.size == 1:
            return whole
        return SharedAttention(whole, SharedTokens(int(packed.lengths.sum()), self.groups.cp))

    def _outputs(self, hidden: Tensor, micro: MicroBatch, packed: Packed, needs: Needs) -> Outputs:
        """Return the outputs of all scored tokens, on each rank along tp and cp of the last stage.

        A rank without one of them scores a token that nobody sees, so that its backward pass takes
        part in the others'.
        """
        from megatron.core.tensor_parallel import mappings

        assert self.head is not None
        if needs.candidates and micro.kept is not None:
            raise ContractError(CANDIDATES_OF_SETS)
        if self.config.sequence_parallel:
            hidden = mappings.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=self.groups.tp
            )
        else:
            hidden = mappings.copy_to_tensor_model_parallel_region(hidden, group=self.groups.tp)
        rows, scored = packed.rows, packed.scored
        num_own = len(rows)
        if num_own == 0:
            rows = rows.new_zeros(1)
        asked = _asked(micro, scored, needs, num_own == 0)
        states = hidden.flatten(0, 1).index_select(0, rows)
        scores = self.head.score(states, asked, self.logit_rows, needs.entropy)
        logprobs, entropy, of_candidates = (
            None if one is None else self._whole(one, scored, micro.num_scored) for one in scores
        )
        if not needs.entropy and entropy is not None:
            entropy = entropy.detach()
        return Outputs(logprobs, entropy, of_candidates)

    def _whole(self, own: Tensor, scored: Tensor, num_scored: int) -> Tensor:
        """Return the outputs of all context-parallel ranks, in the order of the micro-batch."""
        own = own[: len(scored)]
        if self.context.size == 1:
            return own
        placed = own.new_zeros(num_scored, *own.shape[1:]).index_copy(0, scored, own)
        whole: Tensor = SumOver.apply(placed, self.groups.cp)
        return whole

    def _tell_other_stages(
        self,
        micros: Sequence[MicroBatch],
        results: dict[int, Outputs],
        on_outputs: OnOutputs,
        needs: Needs,
    ) -> None:
        """Send the outputs of the last stage to the others, which then call `on_outputs`."""
        last = self.groups.pp.size() - 1
        for number, micro in enumerate(micros):
            shapes: list[tuple[int, ...]] = [(micro.num_scored,)] * 2
            if needs.candidates:
                shapes.append(tuple(micro.columns["candidates"].shape))
            own = vars(results[number]).values() if self.head is not None else [None] * len(shapes)
            tensors = []
            for shape, tensor in zip(shapes, own, strict=False):
                if tensor is None:
                    tensor = torch.empty(shape, device=micro.tokens.device)
                dist.broadcast(tensor, group=self.groups.pp, group_src=last)
                tensors.append(tensor)
            if self.head is None:
                on_outputs(number, Outputs(*(one.requires_grad_() for one in tensors)))


def _asked(micro: MicroBatch, scored: Tensor, needs: Needs, is_empty: bool) -> ScoredRows:
    """Return what this rank scores: for nothing of its own, one row whose scores are dropped."""
    candidates = micro.columns["candidates"].long() if needs.candidates else None
    if not is_empty:
        return ScoredRows(micro.targets, micro.inv_temperature, candidates, micro.kept).select(
            scored
        )
    target = torch.zeros(1, dtype=torch.int64, device=micro.tokens.device)
    if candidates is not None:
        candidates = candidates.new_zeros(1, candidates.shape[1])
    return ScoredRows(target, torch.ones(1, device=target.device), candidates)
