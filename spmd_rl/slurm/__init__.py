"""Slurm jobs: the batch script of a run, and its submission."""
