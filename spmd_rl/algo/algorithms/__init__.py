"""Algorithms by name: each file has a formula, its source, and a function from settings to an
`Algorithm`.
"""

from spmd_rl.algo.algorithms import (  # noqa: F401  make.py reads them by their names
    cispo,
    dapo,
    dr_grpo,
    gdpo,
    gigpo,
    grpo,
    gspo,
    ppo,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
    turn_returns,
)
