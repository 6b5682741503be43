"""Rows that cannot be read: skipped and counted up to a limit, then an error that names them."""

from dataclasses import dataclass, field

from shardwise.base.errors import DataError

_EXAMPLES = 3


@dataclass
class MalformedRows:
    """Counter of the rows that were left out of one or several files."""

    limit: int = 0
    """Number of rows that may be left out; 0: the first malformed row is an error."""
    count: int = 0
    """Number of rows that were left out."""
    examples: list[str] = field(default_factory=list)
    """Places and reasons of the first rows that were left out."""

    def skip(self, where: str, reason: str) -> None:
        """Count one row as left out.

        Args:
            where: file and line of the row.
            reason: the reason why the row cannot be read.

        Raises:
            DataError: if more rows than ``limit`` were left out.
        """
        self.count += 1
        if len(self.examples) < _EXAMPLES or self.count > self.limit:
            self.examples.append(f"{where}: {reason}")
        if self.count <= self.limit:
            return
        if self.limit == 0:
            raise DataError(
                f"{self.examples[0]}. Mend the row, or let some be skipped: data.malformed_limit (convert: "
                "--malformed-limit)"
            )
        raise DataError(
            f"{self.count} malformed rows, more than data.malformed_limit, which is {self.limit}: "
            + "; ".join(self.examples)
        )

    def __str__(self) -> str:
        """Return one line for the log; empty if no row was left out."""
        if not self.count:
            return ""
        return f"{self.count} malformed rows skipped: {'; '.join(self.examples)}"
