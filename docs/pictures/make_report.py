"""Screenshot of a run's report, as the README shows it.

    make demo
    python -m docs.pictures.make_report runs/demo

The script needs Chromium and chromedriver (`tests/system/install.sh` installs them). It writes
docs/pictures/report.png with 64 colours, which keeps the file below 150 KB.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from PIL import Image

from spmd_rl.report import write_report
from tests.system.browser import chromium

TARGET = Path(__file__).with_name("report.png")
WINDOW = (1240, 960)
NUM_COLOURS = 64


def main(run: str) -> None:
    page = write_report([Path(run)])
    with tempfile.TemporaryDirectory() as profile, chromium(Path(profile)) as browser:
        browser.emulate("light")
        browser.resize(*WINDOW)
        browser.open(page)
        browser.screenshot(TARGET)
    with Image.open(TARGET) as picture:
        picture.convert("RGB").quantize(NUM_COLOURS).save(TARGET, optimize=True)
    print(f"{TARGET}: {TARGET.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
