"""Weights on their way from the ranks that train to the ranks that generate.

layout         Box, Piece, Layout: the boxes that a rank holds of each tensor (no torch)
layout_rules   LayoutRules: a layout in a few rules, as it crosses the wire (no torch)
tensors_alike  the tensors that all ranks hold alike, which are planned together (no torch)
ends           WeightSource, WeightSink: what a push asks of each end (no torch)
local_tensors  LocalTensors: a rank's tensors under their canonical names, and their layout
tensor_ends    TensorSource, TensorSink: ends over ordinary tensors
plan           plan_moves(sources, destinations, ...): the moves of one rank (no torch)
executors      execute(moves, ends, ...) carries out a plan; alias(...) shares memory instead
delivery       Delivery: batched copies into a sink
peer_socket    PeerSocket: messages and descriptors between a rank and its engine's process
slab           Slab, MappedSlab: memory that both of these processes have mapped
portions       a push through the two halves of a slab; how boxes are cut to fit
portion_writer PortionWriter: the rank's end of it
portion_reader PortionReader: the end in the engine's process
digest         BoxSums: 64 bits a box; they add up to those of whole tensors
verification   Verifier: compares both ends of a push; its result is in verdict (no torch)

A link makes the plan once and replays it at every push:

    layouts of both ends -> plan -> compare its digest on all ranks -> alias -> at each push:
    execute -> compare both ends

Ranks are those of the world. Nothing here makes a process group; only `peer_socket` uses a socket.
"""
