"""Command-line arguments that DeepSpeed's scripts add to their parser."""

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config FILE``, also under older names, to ``parser`` and return it."""
    group = parser.add_argument_group("DeepSpeed", "the same names on Shardwise")
    for name in ("deepspeed", "deepscale"):
        group.add_argument(
            f"--{name}", action="store_true", help="for the script itself; initialize() acts anyway"
        )
        group.add_argument(f"--{name}_config", default=None, type=str, help="path of the configuration")
    return parser
