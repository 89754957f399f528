"""Our own engine: the scheduler decides when, the shared model definition computes what
(docs/engine.md).

engine.py     what a Rollout calls: requests in, steps, samples out, sleep and wake scheduler.py
who computes which tokens in the next step; plan.py is its answer, rows.py and pages.py what it
works on steps.py      one step on the device, eager or from graphs.py and prompt_graphs.py stop.py
stop strings over tokens
"""
