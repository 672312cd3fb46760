"""The study's folders."""

import os
from pathlib import Path

ROOT = Path(os.environ.get("Q0_ROOT") or Path(__file__).resolve().parent.parent)
NOTEBOOKS = ROOT / "notebooks"
FIGURES = ROOT / "figures"
DATA = ROOT / "data"
PUBLISHED = DATA / "published"
RESULTS = DATA / "results"
CACHE = DATA / "cache"
RUNS = DATA / "runs"
