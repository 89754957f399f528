"""Metrics of the experts in a train step: how unevenly tokens went to them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.model.layers.expert_loads import ExpertLoads
from spmd_rl.model.layers.route_replay import RouteReplay

BALANCE_LOSS = "experts/balance_loss"
REROUTED, REROUTED_WORST = "experts/rerouted", "experts/rerouted_worst"


class LoadTally:
    """Sums over the micro-batches of a train step, on the device until `metrics`."""

    def __init__(self) -> None:
        self._counts: Tensor | None = None
        self._balance: Tensor | None = None
        self._rerouted: Tensor | None = None

    def add(self, loads: ExpertLoads, balance: Tensor | None, replay: RouteReplay | None) -> None:
        """Add a micro-batch, its share of the loss that balances experts, and its replay."""
        counts = loads.counts()
        self._counts = counts if self._counts is None else self._counts + counts
        if balance is not None:
            own = balance.detach().double()
            self._balance = own if self._balance is None else self._balance + own
        if replay is not None:
            rerouted = replay.counts()
            self._rerouted = rerouted if self._rerouted is None else self._rerouted + rerouted

    def metrics(self, context: RoleContext, optimizer_steps: int) -> dict[str, float]:
        """Return the metrics of all ranks; none for a model without experts.

        Ranks: all of the role. Blocks: until each has called.
        """
        if self._counts is None:
            return {}
        balances = self._balance is not None
        loss = self._balance if balances else torch.zeros((), dtype=torch.float64)
        assert loss is not None
        rerouted = self._counts.new_zeros(0, 2) if self._rerouted is None else self._rerouted
        sums = (self._counts, loss, rerouted)
        own = torch.cat([one.flatten().double().cpu() for one in sums])
        total = context.all_reduce_sum(own.numpy())
        counts, (balance,), of_layers = np.split(total, np.cumsum([self._counts.numel(), 1]))
        found = load_metrics(counts.reshape(self._counts.shape))
        if len(of_layers):
            found |= replay_metrics(of_layers.reshape(-1, 2))
        if balances:
            found[BALANCE_LOSS] = float(balance) / context.shard_size / optimizer_steps
        return found


def replay_metrics(counts: NDArray[np.float64]) -> dict[str, float]:
    """Return the share of recorded choices that the router would have made otherwise: the mean over
    layers, and that of the worst layer.

    Shape: [L, 2], the rows whose router would have chosen others, and those that were recorded.
    """
    shares = counts[:, 0] / np.maximum(counts[:, 1], 1)
    return {REROUTED: float(shares.mean()), REROUTED_WORST: float(shares.max())}


def load_metrics(counts: NDArray[np.float64]) -> dict[str, float]:
    """Return the mean over layers and that of the worst layer, of three measures of loads.

    The largest load is in multiples of the mean one, the entropy in shares of the largest
    possible, and the unused experts in shares of all. Shape: [L, E].
    """
    num_experts = counts.shape[1]
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    logs = np.log(np.where(shares > 0, shares, 1))
    entropy = -(shares * logs).sum(1) / np.log(num_experts) if num_experts > 1 else np.ones(1)
    largest, unused = num_experts * shares.max(1), (counts == 0).mean(1)
    return {
        "experts/max_load": float(largest.mean()),
        "experts/max_load_worst": float(largest.max()),
        "experts/entropy": float(entropy.mean()),
        "experts/entropy_worst": float(entropy.min()),
        "experts/unused": float(unused.mean()),
        "experts/unused_worst": float(unused.max()),
    }
