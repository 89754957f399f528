"""A second implementation of the algorithms: padded [answers, tokens] tensors, as other libraries.

It is written from the formulas of TRL (GRPOTrainer, RLOOTrainer) and of verl
(trainer/ppo/core_algos.py), and shares no code with the package. Where their small constants
differ from ours, ours are used: TRL adds 1e-4 to a standard deviation, verl 1e-6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tests.unit.algo.cases import Answer

F64 = torch.float64


@dataclass
class Padded:
    """Answers as a matrix; `mask` is 1 for tokens that are learned."""

    logprobs: Tensor
    old: Tensor
    rollout: Tensor
    reference: Tensor
    values: Tensor
    entropy: Tensor
    mask: Tensor
    group: Tensor
    rewards: Tensor
    parts: dict[str, Tensor]
    truncated: Tensor

    @staticmethod
    def of(answers: list[Answer], leaf: Tensor) -> Padded:
        """Pad the answers; `leaf` holds the log-probs of all, end to end."""

        def pad(rows: list[Tensor]) -> Tensor:
            return pad_sequence(rows, batch_first=True)

        def column(name: str) -> Tensor:
            return pad([torch.tensor(getattr(answer, name), dtype=F64) for answer in answers])

        names = answers[0].parts
        return Padded(
            logprobs=pad(list(leaf.split([answer.num_tokens for answer in answers]))),
            old=column("old"),
            rollout=column("rollout"),
            reference=column("reference"),
            values=column("values"),
            entropy=column("entropy"),
            mask=column("learned"),
            group=torch.tensor([answer.prompt for answer in answers]),
            rewards=torch.tensor([answer.reward for answer in answers], dtype=F64),
            parts={
                name: torch.tensor([answer.parts[name] for answer in answers], dtype=F64)
                for name in names
            },
            truncated=torch.tensor([answer.status == "truncated" for answer in answers]),
        )


def group_normalised(rewards: Tensor, group: Tensor, scale: bool) -> Tensor:
    """GRPO's advantages; without `scale` those of Dr.GRPO (TRL: scale_rewards="none")."""
    advantages = torch.zeros_like(rewards)
    for number in group.unique():
        mine = group == number
        advantages[mine] = rewards[mine] - rewards[mine].mean()
        if scale:
            advantages[mine] = advantages[mine] / (rewards[mine].std() + 1e-6)
    return advantages


def leave_one_out(rewards: Tensor, group: Tensor) -> Tensor:
    """RLOO's advantages (TRL: RLOOTrainer): the baseline is the mean of the others."""
    same = (group[:, None] == group[None, :]).to(F64)
    others = same - torch.eye(len(group), dtype=F64)
    return rewards - (others @ rewards) / others.sum(1)


def decoupled(p: Padded, weights: dict[str, float]) -> Tensor:
    """GDPO's advantages (TRL: multi_objective_aggregation="normalize_then_sum")."""
    stacked = torch.stack([group_normalised(p.parts[name], p.group, True) for name in weights], 1)
    summed = (stacked * torch.tensor(list(weights.values()), dtype=F64)).sum(1)
    return (summed - summed.mean()) / (summed.std() + 1e-6)


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """verl: masked_whiten, whose variance is unbiased."""
    chosen = values[mask.bool()]
    return (values - chosen.mean()) * torch.rsqrt(chosen.var() + 1e-8)


def rewards_at_the_end(p: Padded, kl_coef: float) -> Tensor:
    """verl: apply_kl_penalty with k1, and the score on the last valid token."""
    rewards = -kl_coef * (p.old - p.reference) * p.mask
    columns = torch.arange(p.mask.shape[1])
    last = (p.mask * columns).argmax(1)
    rewards[torch.arange(len(last)), last] += p.rewards
    return rewards


def reinforce_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """verl: compute_reinforce_plus_plus_outcome_advantage, before whitening.

    A token outside the mask does not discount: it is no step of the policy.
    """
    later = torch.zeros(len(rewards), dtype=F64)
    returns = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        here = rewards[:, t] + gamma * later
        later = torch.where(mask[:, t].bool(), here, later)
        returns[:, t] = later
    return returns


def generalised_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> Tensor:
    """verl: compute_gae_advantage_return, which skips tokens outside the mask."""
    next_value, last = torch.zeros(len(rewards), dtype=F64), torch.zeros(len(rewards), dtype=F64)
    columns = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        new = delta + gamma * lam * last
        valid = mask[:, t]
        next_value = values[:, t] * valid + (1 - valid) * next_value
        last = new * valid + (1 - valid) * last
        columns.append(last)
    return torch.stack(columns[::-1], 1)


def turn_returns(p: Padded, gamma: float) -> Tensor:
    """A turn is a run of learned tokens, and the reward is that of an answer's last one."""
    mask = p.mask.double()
    starts = mask * (1 - torch.nn.functional.pad(mask, (1, 0))[:, :-1])
    number = starts.cumsum(1)
    returns = p.rewards.double()[:, None] * gamma ** (number[:, -1:] - number)
    same = (p.group[:, None] == p.group[None]).double()
    mean = (same @ (returns * starts).sum(1)) / (same @ starts.sum(1))
    return ((returns - mean[:, None]) * mask).to(p.rewards.dtype)


def token_advantages(p: Padded, s: dict[str, Any]) -> Tensor:
    kind, coef = s.get("advantage", "grpo"), s.get("kl_reward", 0.0)
    gamma = s.get("discount", 1.0)
    if kind == "reinforce_pp":
        returns = reinforce_returns(rewards_at_the_end(p, coef), p.mask, gamma)
        return masked_whiten(returns, p.mask)
    if kind == "ppo":
        rewards = rewards_at_the_end(p, coef)
        lam = s.get("lambda", 1.0)
        advantages = generalised_advantages(rewards, p.values, p.mask, gamma, lam)
        return masked_whiten(advantages, p.mask)
    if "overlong" in s:
        buffer, penalty = s["overlong"]
        exceeds = p.mask.sum(1) - (s["max_tokens"] - buffer)
        p.rewards = p.rewards + (-exceeds / buffer * penalty).clamp(max=0)
    if kind == "turn_returns":
        return turn_returns(p, gamma)
    by_answer = {
        "grpo": lambda: group_normalised(p.rewards, p.group, True),
        "dr": lambda: group_normalised(p.rewards, p.group, False),
        "baseline": lambda: group_normalised(p.rewards, p.group, False),
        "rloo": lambda: leave_one_out(p.rewards, p.group),
        "gdpo": lambda: decoupled(p, s["parts"]),
    }[kind]()
    tokens = by_answer[:, None] - coef * (p.old - p.reference)
    return masked_whiten(tokens, p.mask) if kind == "baseline" else tokens


def policy_terms(p: Padded, advantages: Tensor, s: dict[str, Any]) -> Tensor:
    """Return the surrogate of every token."""
    low, high = s.get("low", 0.2), s.get("high", 0.2)
    log_ratio = p.logprobs - (p.old if s.get("behaviour", "old") == "old" else p.rollout)
    if s.get("surrogate") == "gspo":  # TRL: importance_sampling_level="sequence"
        log_ratio = ((log_ratio * p.mask).sum(1) / p.mask.sum(1))[:, None].expand_as(log_ratio)
    coef = torch.exp(log_ratio)
    if s.get("surrogate") == "cispo":
        return -torch.clamp(coef, 1 - low, 1 + high).detach() * advantages * p.logprobs
    losses = -torch.min(coef * advantages, torch.clamp(coef, 1 - low, 1 + high) * advantages)
    if s.get("dual") is not None:  # verl: clip_ratio_c
        losses = torch.where(advantages < 0, torch.min(losses, -advantages * s["dual"]), losses)
    return losses


def kl_terms(p: Padded, s: dict[str, Any]) -> Tensor:
    """verl: kl_penalty. With the unbiased form the ratio's gradient flows (TRL: use_bias_...)."""
    difference = p.reference - p.logprobs
    k3 = torch.exp(difference) - difference - 1
    kl = {
        "k1": -difference,
        "k2": 0.5 * difference.pow(2),
        "k3": k3,
        "low_var": k3.clamp(-10, 10),
    }[s["kl"]]
    return torch.exp(p.logprobs - p.old) * kl if s.get("kl_unbiased") else kl


def level_ratios(p: Padded, level: str) -> Tensor:
    """verl: rollout_is_level and rollout_rs_level; TRL has token and sequence."""
    log_ratio = (p.old - p.rollout) * p.mask
    if level != "token":
        total = log_ratio.sum(1, keepdim=True)
        log_ratio = total if level == "sequence" else total / p.mask.sum(1, keepdim=True)
    return log_ratio.clamp(-20, 20).exp().expand_as(p.mask)


def padded_loss(answers: list[Answer], leaf: Tensor, s: dict[str, Any]) -> Tensor:
    """Return the loss of all answers with the settings of `by_hand`."""
    p = Padded.of(answers, leaf)
    advantages = token_advantages(p, s).detach()
    losses = policy_terms(p, advantages, s)
    if s.get("weight") is not None:
        mode, level, low, high = s["weight"]
        ratio = level_ratios(p, level)
        inside = (ratio >= low) & (ratio <= high)
        weight = {
            "truncate": ratio.clamp(max=high),
            "clip": ratio.clamp(low, high),
            "mask": torch.where(inside, ratio, 0.0),
        }[mode]
        if s.get("mean_one"):  # verl: rollout_is_batch_normalize
            weight = weight / ((weight * p.mask).sum() / p.mask.sum())
        losses = losses * weight
    if s.get("opsm") is not None:  # slime: --use-opsm
        fall = (((p.old - p.logprobs) * p.mask).sum(1) / p.mask.sum(1)).detach()[:, None]
        losses = losses * ~((advantages < 0) & (fall > s["opsm"]))
    if s.get("kl"):
        losses = losses + s["kl_coef"] * kl_terms(p, s)
    losses = losses - s.get("entropy", 0.0) * p.entropy
    kept = p.mask.clone()
    if s.get("reject") is not None:
        level, low, high = s["reject"]
        ratio = level_ratios(p, level)
        kept = kept * (ratio >= low) * (ratio <= high)
    if s.get("veto") is not None:
        ratios = level_ratios(p, "token").masked_fill(p.mask == 0, 1.0)
        kept = kept * (ratios.amin(1, keepdim=True) >= s["veto"])
    if s.get("mask_truncated"):
        kept = kept * ~p.truncated[:, None]
    numerators = (losses * kept).sum(1)
    aggregation = s.get("aggregation", "token")
    if aggregation == "token":
        return numerators.sum() / p.mask.sum()
    if aggregation == "sample":
        return (numerators / p.mask.sum(1)).mean()
    return numerators.sum() / (len(answers) * s["max_tokens"])
