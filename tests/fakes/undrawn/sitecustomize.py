"""Python runs this at its start in processes of a test's run: they draw no curves.

To draw takes a second of each run.
"""

import sys
from types import ModuleType

curves = ModuleType("spmd_rl.report.pictures.curves")
curves.draw = lambda rows, path, title: None
sys.modules[curves.__name__] = curves
