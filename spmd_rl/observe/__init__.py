"""What a run shows and leaves behind: its folder, metrics, samples, curves and the live view."""
