"""Hooks: functions of the user that grade samples, generate them, or choose groups.

They run in processes of their own beside a rank, so that one that hangs or dies costs its own
sample only (docs/hooks.md).
"""
