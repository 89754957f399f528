import sys

collect_ignore = [] if sys.platform == "linux" else ["test_compiled.py"]  # Triton has no compiler elsewhere
