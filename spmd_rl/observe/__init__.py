"""Files of a run: its folder and lock, metrics, samples, traces and provenance."""
