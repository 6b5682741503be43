"""Run the command line with ``python -m shardwise``: the same program as the installed ``shardwise``."""

from shardwise.cli.main import main

if __name__ == "__main__":
    main()
