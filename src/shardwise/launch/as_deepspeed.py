"""``shardwise launch --as-deepspeed``: in this job, ``import deepspeed`` is Shardwise.

A folder of the job alone comes first on the path of its ranks and of every Python process that they start:

    deepspeed/__init__.py                hands the name over to ``shardwise.deepspeed``
    deepspeed-VERSION.dist-info/         what Hugging Face's libraries look for before they use DeepSpeed

Nothing is installed, a DeepSpeed that is stays as it is, and the folder ends with the job.
"""

import os
from pathlib import Path

from shardwise.plan.regular_files import read_small_text

VERSION = "0.19.8"
"""Of the DeepSpeed whose names and keys are answered."""

_PACKAGE = '''"""Shardwise under the name of DeepSpeed, in this job alone."""

from shardwise.deepspeed.importer import answer_as

answer_as(__name__)
'''
_METADATA = f"""Metadata-Version: 2.1
Name: deepspeed
Version: {VERSION}
Summary: Shardwise under the name of DeepSpeed, in this job alone
"""
_ENV_FILE = ".deepspeed_env"


def names_of_deepspeed(folder: Path, path: str) -> dict[str, str]:
    """Write the package into ``folder``; the variables that make it the first that Python finds.

    ``path``: the ``PYTHONPATH`` that stands.
    """
    names = folder / "names"
    (names / "deepspeed").mkdir(parents=True)
    (names / "deepspeed" / "__init__.py").write_text(_PACKAGE, encoding="utf-8")
    metadata = names / f"deepspeed-{VERSION}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(_METADATA, encoding="utf-8")
    return {"PYTHONPATH": os.pathsep.join([str(names), *filter(None, [path])])}


def read_env_file() -> dict[str, str]:
    """The variables in ``.deepspeed_env``, of this folder, else of the home folder: a line ``NAME=VALUE`` each."""
    for place in (Path.cwd, Path.home):
        try:
            text = read_small_text(place() / _ENV_FILE)
        except (OSError, RuntimeError):  # RuntimeError: a user without HOME and without an entry in passwd
            continue
        pairs = (
            line.strip().partition("=") for line in text.splitlines() if not line.lstrip().startswith("#")
        )
        return {name.strip(): value.strip() for name, equals, value in pairs if equals and name.strip()}
    return {}
