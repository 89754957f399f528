"""Torch module of the planted Mamba2 mixer: each sequence alone, token after token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from spmd_rl.kernels import Rotary, TokenAttention
from spmd_rl.model.linear import Linear

if TYPE_CHECKING:
    from tests.planted.mamba import Mamba2


class MambaMixer(nn.Module):
    def __init__(self, spec: Mamba2, number: int) -> None:
        super().__init__()
        self.spec, self.number = spec, number
        self.dt_bias = nn.Parameter(torch.ones(spec.num_heads))
        self.A_log = nn.Parameter(torch.zeros(spec.num_heads))
        self.D = nn.Parameter(torch.ones(spec.num_heads))
        self.conv1d = nn.Conv1d(
            spec.conv_width, spec.conv_width, spec.conv_size, groups=spec.conv_width
        )
        rows = spec.width + spec.conv_width + spec.num_heads
        self.in_proj = Linear(spec.hidden_size, rows, bias=False)
        self.norm = GroupNorm(spec)
        self.out_proj = Linear(spec.width, spec.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: Rotary, attend: TokenAttention) -> Tensor:
        spec = self.spec
        gate, xbc, dt = self.in_proj(x).split([spec.width, spec.conv_width, spec.num_heads], -1)
        mixed = torch.zeros(len(x), spec.width)
        for rows, states in attend.sequences(self.number):
            counts = states.lengths.tolist()
            parts = zip(xbc[rows].split(counts), dt[rows].split(counts), strict=True)
            begins = states.begin(0), states.begin(1)
            out, lasts, ends = [], [], []
            for number, (new, steps) in enumerate(parts):
                before = [None if one is None else one[number] for one in begins]
                taken, last, end = self._sequence(new, steps, *before)
                out.append(taken)
                lasts.append(last)
                ends.append(end)
            mixed[rows] = torch.cat(out)
            states.end(0, torch.stack(lasts))
            states.end(1, torch.stack(ends))
        return self.out_proj(self.norm(mixed, gate))

    def _sequence(
        self, xbc: Tensor, dt: Tensor, rows: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        spec = self.spec
        if rows is None:
            rows = xbc.new_zeros(spec.conv_size - 1, spec.conv_width)
        if state is None:
            state = torch.zeros(spec.num_heads, spec.head_dim, spec.state_size)
        whole, count = torch.cat([rows, xbc]), len(xbc)
        taps = self.conv1d.weight[:, 0]
        total = sum(whole[tap : tap + count] * taps[:, tap] for tap in range(spec.conv_size))
        total = total + self.conv1d.bias
        total = total / (1 + total.neg().exp())
        shared = spec.num_groups * spec.state_size
        x, b, c = total.split([spec.width, shared, shared], -1)
        x = x.unflatten(-1, (spec.num_heads, spec.head_dim))
        each = spec.num_heads // spec.num_groups
        b, c = (
            one.unflatten(-1, (spec.num_groups, -1)).repeat_interleave(each, 1) for one in (b, c)
        )
        steps = (1 + (dt + self.dt_bias).exp()).log().clamp(min=spec.least_step)
        decay = (-self.A_log.exp() * steps).exp()
        out = []
        for token in range(count):
            added = (steps[token][:, None] * x[token])[..., None] * b[token][:, None]
            state = decay[token][:, None, None] * state + added
            read = (state * c[token][:, None]).sum(-1)
            out.append((read + self.D[:, None] * x[token]).flatten())
        return torch.stack(out), whole[count:], state


class GroupNorm(nn.Module):
    """Norm of each group, of what is gated before it."""

    def __init__(self, spec: Mamba2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(spec.width))
        self.groups, self.eps = spec.num_groups, spec.rms_eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        gated = (x * (gate / (1 + gate.neg().exp()))).unflatten(-1, (self.groups, -1))
        normed = gated * (gated.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return normed.flatten(1) * self.weight
