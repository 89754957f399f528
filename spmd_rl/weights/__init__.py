"""Weights from the ranks that train to the ranks that generate.

    layout     Box, Piece, Layout: which box of which canonical tensor a rank holds, as plain data
    (no torch) held       Held: a rank's local tensors under their canonical names;
    `held.layout(rank)` describes them plan       plan(src layouts, dst layouts, nodes, rank) ->
    Plan: the moves of one rank, pure executors  execute(plan, rank, src, dst, group): run a plan;
    alias(dst, src): share storage once, copy never digest     digest(held): 64 bits a tensor;
    combine(...) adds shards up, whatever the layout

A link makes the plan once and replays it:

    layouts of both sides -> plan -> compare plan.digest on all ranks -> alias where it can ->
execute at every push

Ranks are those of the world. Nothing here opens a socket or makes a process group.
"""
