"""Puts ``benchmarks/data_parallel`` on the import path: its groups of ranks, rounds and counters serve here too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "data_parallel"))
