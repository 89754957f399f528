"""Bytes between controller and workers: messages, encryption and sockets. It decides nothing."""
