"""Short names of the graders that are shipped."""

from __future__ import annotations

GRADERS: dict[str, str] = {
    "code": "spmd_rl.rewards.code:code",
    "judge": "spmd_rl.rewards.judge:judge",
    "remote": "spmd_rl.rewards.remote:remote",
}
