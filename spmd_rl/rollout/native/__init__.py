"""The native engine: the scheduler plans steps, and the shared model definition computes them
(docs/engine.md).

engine.py             the Engine protocol: requests in, steps, samples out, sleep and wake
scheduler.py          the plan of each step (step_plan.py); admission.py starts waiting requests
sequence_table.py     the running sequences as arrays; pages.py has their pages of KV memory
prefix_sharing.py     what samples of one prompt, and later requests, need not compute again
model_runner.py       one step on the device, eager or from decode_graphs.py and prefill_graphs.py
joint/                one step of ranks that share experts, where decoding is recorded
replay.py             the public hook for tools that follow an engine step by step
"""
