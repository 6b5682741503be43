"""``import shardwise`` is silent, light, and touches no device."""

import subprocess
import sys


def test_the_import_prints_nothing_and_loads_nothing_heavy() -> None:
    code = (
        "import sys, shardwise\n"
        "heavy = {'torch', 'pydantic', 'matplotlib', 'transformers', 'tensorboard', 'typer', 'rich', 'yaml'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert done.stderr == ""
