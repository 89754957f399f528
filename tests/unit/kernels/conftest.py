import sys

# Triton has no compiler elsewhere
collect_ignore = [] if sys.platform == "linux" else ["test_compiled.py"]
