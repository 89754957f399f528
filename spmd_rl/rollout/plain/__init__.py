"""The plain engine, for models that `transformers` computes: correct and simple, not fast.

engine.py   the Engine protocol; cohort.py has the requests that run, draw.py draws their tokens
config.py   its settings, and which settings of a native engine it has too
"""
