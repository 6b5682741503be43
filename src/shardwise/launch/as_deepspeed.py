"""``shardwise launch --as-deepspeed``: in this job, ``import deepspeed`` imports Shardwise.

A folder of this job comes first on the path of its ranks and of every Python process that they start:

    deepspeed/__init__.py                forwards the name to ``shardwise.deepspeed``
    deepspeed-VERSION.dist-info/         metadata that Hugging Face's libraries look for before they use DeepSpeed

Nothing is installed, an installed DeepSpeed stays as it is, and the folder is removed with the job.
"""

import os
from pathlib import Path

from shardwise.base.regular_files import read_small_text

VERSION = "0.19.8"
"""Version of DeepSpeed whose names and keys are supported."""

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
    """Write the package into ``folder`` and return the variables that make Python find it first.

    Args:
        folder: Folder of the job.
        path: Current value of ``PYTHONPATH``.
    """
    names = folder / "names"
    (names / "deepspeed").mkdir(parents=True)
    (names / "deepspeed" / "__init__.py").write_text(_PACKAGE, encoding="utf-8")
    metadata = names / f"deepspeed-{VERSION}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(_METADATA, encoding="utf-8")
    return {"PYTHONPATH": os.pathsep.join([str(names), *filter(None, [path])])}


def read_env_file() -> dict[str, str]:
    """Return the variables in ``.deepspeed_env``, one line ``NAME=VALUE`` each.

    The file is that of this folder, else that of the home folder.
    """
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
