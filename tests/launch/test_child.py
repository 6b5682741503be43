"""The launcher's part in a rank reports how the program failed, also when no memory is left for the report."""

import os
import subprocess
import sys
from pathlib import Path

from tests.launch.cuts import FAILURES

from shardwise.launch.failure import read


def test_a_rank_without_memory_reports_its_traceback(tmp_path: Path) -> None:
    """The program fills every address that it may have, and holds all of it when the report is written."""
    script = tmp_path / "train.py"
    fill = FAILURES["memory, a limit of the process"].replace("1 << 20", "1 << 12")
    script.write_text("import resource\nfrom pathlib import Path\n" + fill)
    record = tmp_path / "failure.json"
    done = subprocess.run(
        [sys.executable, "-m", "shardwise.launch.child", "script", str(script)],
        env=os.environ | {"SHARDWISE_FAILURE": str(record), "RANK": "3"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done
    found = read(record, 3, 0.0)
    assert found.headline == "MemoryError" and "held.append" in found.traceback, (found, done.stderr)
