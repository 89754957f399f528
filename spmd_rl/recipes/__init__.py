"""The loops we ship, each a page to read, to fork, or to run: `spmd-rl run grpo --model PATH --data
FILE`.
"""
