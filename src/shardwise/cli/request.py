"""The user's request to ``shardwise train``, as it is passed to the ranks."""

import json
import shlex
from dataclasses import asdict, dataclass

from shardwise.base.errors import ConfigError
from shardwise.cli.examples import named
from shardwise.cli.runs.chosen_step import NEWEST
from shardwise.config.run import RunConfig, load


@dataclass(frozen=True)
class CommandRequest:
    """The user's request on the command line."""

    config: str
    overrides: tuple[str, ...] = ()
    resume: str = "auto"
    profile_steps: int = 0
    ranks: int | None = None
    memory_snapshot: str | None = None
    """File from whose name those of the ranks' memory snapshots are made."""
    step: str = NEWEST
    """Step of the run to resume from: a value of ``--step``."""
    host_words: tuple[str, ...] = ()
    """Options of hosts, as words of the command line."""

    def to_json(self) -> str:
        """Return the request as JSON, for the ranks' command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "CommandRequest":
        """Return the request that :meth:`to_json` wrote."""
        given = json.loads(text)
        return cls(**given | {name: tuple(given[name]) for name in ("overrides", "host_words")})

    def command(self) -> str:
        """Return the command that continues this run."""
        words = ["shardwise", "train", self.config]
        words += self.host_words or (["--ranks", str(self.ranks)] if self.ranks is not None else [])
        words += [word for override in self.overrides for word in ("--set", override)]
        return shlex.join(words)

    def load(self) -> RunConfig:
        """Return the configuration of the run.

        Raises:
            ConfigError: if it is not valid, or has no model or no batch size.
        """
        config = load(named(self.config), self.overrides)
        if config.model is None:
            raise ConfigError(
                f"{self.config}: model is missing; give {{name: gpt, layers: 6, width: 384, heads: 6, context: 256}}, "
                f"{{name: dlrm, width: 16}} or {{target: 'module:function'}}"
            )
        if config.batch.global_size is None and config.batch.micro_size is None:
            raise ConfigError(
                f"{self.config}: batch.global_size is missing: the samples of one optimizer step over all ranks"
            )
        return config
