"""Our own engine: the scheduler decides when, the shared model definition computes what.

pages.py      pages of KV memory and the prefix cache over them
rows.py       the running sequences, as arrays
scheduler.py  who computes which tokens in the next step
stop.py       stop strings over tokens
engine.py     one step: schedule, run the model, sample, hand out
"""
