"""Environments: worlds and programs in which a policy acts in several turns (docs/agents.md).

An environment shows messages and takes replies; `play.py` lets the policy play it. `program.py` is
the program of episodes that the setting `agent` chooses.
"""
