"""`python train.py ...` is `python scripts/train.py ...`."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    scripts = Path(__file__).resolve().parent / "scripts"
    sys.path.insert(0, str(scripts))
    sys.argv[0] = str(scripts / "train.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
