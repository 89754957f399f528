"""Direct preference optimization: losses over pairs of answers to one prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from spmd_rl.algo.by_source import by_source
from spmd_rl.algo.losses import LossInput, ValueInput, column_of
from spmd_rl.algo.pair_packing import PAIR_SCALE
from spmd_rl.errors import ConfigError, ContractError

if TYPE_CHECKING:
    from torch import Tensor

DpoLossType = Literal["sigmoid", "ipo", "hinge"]

REFERENCE = "reference_logprobs"


def dpo_loss(
    out: LossInput,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    loss_type: DpoLossType = "sigmoid",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each pair, at the pair's first token in the mask.

    With h = (logprob - reference of the chosen answer) - (the same of the rejected one), where
    log-probs are sums over an answer's tokens:

        sigmoid  -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), e = label_smoothing
        hinge    max(0, 1 - beta h)
        ipo      (h - 1 / (2 beta))^2, where log-probs are means over an answer's tokens

    The batch comes from `pack_pairs`, and has the column "reference_logprobs".
    Source: Rafailov et al. 2023 (DPO); Mitchell 2023 (label smoothing); Azar et al. 2023 (IPO);
    Zhao et al. 2023 (hinge).
    """
    from torch import ones_like, where

    scale = column_of(out.columns, PAIR_SCALE, "pack it with pack_pairs")
    reference = column_of(
        out.columns,
        REFERENCE,
        "add it by batch.with_columns(reference_logprobs=reference.score.call(batch))",
    )
    ratios = _answer_sums(out, out.logprobs - reference)
    rewards, logprobs = beta * ratios.detach(), _answer_sums(out, out.logprobs.detach())
    if loss_type == "ipo":
        ratios = ratios / _answer_sums(out, ones_like(out.logprobs)).clamp(min=1)
    difference = ratios[0::2] - ratios[1::2]
    losses = _pair_losses(difference, beta, label_smoothing, loss_type)
    chosen, rejected = rewards[0::2], rewards[1::2]
    measured = {
        "dpo/accuracy": (chosen > rejected).to(chosen.dtype),
        "dpo/margin": chosen - rejected,
        "dpo/chosen_reward": chosen,
        "dpo/rejected_reward": rejected,
        "dpo/chosen_logprob": logprobs[0::2],
        "dpo/rejected_logprob": logprobs[1::2],
    }
    pair = out.sequence // 2
    per_token = where(scale > 0, losses[pair], losses.new_zeros(()))
    measured = {name: values[pair] * scale for name, values in measured.items()}
    own = {key: measured[f"dpo/{key}"] for key in ("accuracy", "margin")}
    return per_token, measured | by_source(out.columns, scale, own)


def _pair_losses(
    difference: Tensor, beta: float, label_smoothing: float, loss_type: DpoLossType
) -> Tensor:
    from torch.nn.functional import logsigmoid

    if loss_type == "ipo":
        return (difference - 1 / (2 * beta)) ** 2
    if loss_type == "hinge":
        return (1 - beta * difference).relu()
    if loss_type != "sigmoid":
        raise ConfigError(f"loss_type must be sigmoid, ipo or hinge, not {loss_type!r}")
    agreed, flipped = logsigmoid(beta * difference), logsigmoid(-beta * difference)
    return -(1 - label_smoothing) * agreed - label_smoothing * flipped


def bradley_terry_loss(
    out: ValueInput, *, margin: float = 0.0, center_coef: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return -log sigmoid(r_chosen - r_rejected - margin) of each pair, at its chosen answer.

    `center_coef` adds center_coef * (r_chosen + r_rejected)^2, which keeps rewards around zero.
    The batch is sequence_ends(pack_pairs(pairs)): each answer has one value, its reward.
    Raises: ContractError for another batch.
    Source: Ouyang et al. 2022 (InstructGPT); Touvron et al. 2023 (margin, Llama 2); Eisenstein et
    al. 2023 (centering).
    """
    from torch import ones_like
    from torch.nn.functional import logsigmoid

    if len(out.values) != out.num_sequences or out.num_sequences % 2:
        raise ContractError(
            "bradley_terry_loss needs one value for each answer of each pair: pack the batch with "
            "sequence_ends(pack_pairs(pairs))"
        )
    chosen, rejected = out.values[0::2], out.values[1::2]
    losses = -logsigmoid(chosen - rejected - margin)
    if center_coef:
        losses = losses + center_coef * (chosen + rejected) ** 2
    per_token = losses.repeat_interleave(2) * (out.sequence % 2 == 0)
    measured = {
        "reward_model/accuracy": (chosen > rejected).to(chosen.dtype),
        "reward_model/margin": (chosen - rejected).detach(),
        "reward_model/chosen": chosen.detach(),
        "reward_model/rejected": rejected.detach(),
    }
    measured = {name: values.repeat_interleave(2) for name, values in measured.items()}
    own = {key: measured[f"reward_model/{key}"] for key in ("accuracy", "margin")}
    return per_token, measured | by_source(out.columns, ones_like(out.values), own)


def _answer_sums(out: LossInput, values: Tensor) -> Tensor:
    """Return the sum over each answer's tokens, in their order, whatever else is in the batch.

    Shape: [M] to [num_sequences].
    """
    from torch import bincount, segment_reduce

    lengths = bincount(out.sequence, minlength=out.num_sequences)
    return segment_reduce(values.contiguous(), "sum", lengths=lengths, unsafe=True)
