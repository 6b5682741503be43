"""The command line: ``shardwise train``, ``launch``, ``generate``, ``inspect``, ``convert``."""
