"""Arguments that DeepSpeed's scripts add to their parser."""

import argparse

from shardwise.deepspeed.calls.arguments import add_config_arguments


def test_both_names_are_read() -> None:
    parser = add_config_arguments(argparse.ArgumentParser())
    given = parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json"])
    assert (given.deepspeed, given.deepspeed_config, given.deepscale) == (True, "ds.json", False)
    assert parser.parse_args(["--deepscale_config", "a"]).deepscale_config == "a"
    assert parser.parse_args([]).deepspeed_config is None
