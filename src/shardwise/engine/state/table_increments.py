"""TableIncrements: which saves hold all rows of the tables, and which only those that changed.

    tables_full_every: 4     save   40    80   120   160   200   240
                             holds  full  +40  +40   +40   full  +200          each + is read with the one full step

Rank 0 names the full step, because it alone has its manifest. Each rank keeps the numbers of steps that its collections
had done at a full save, by the number of that save: the collections count only steps that were applied. A load forgets
them, because the marks of rows then belong to other steps.

Cost: one exchange of a line of text in a save.
"""

import json
from pathlib import Path
from typing import NamedTuple

from shardwise.checkpoint.manifest import BaseStep
from shardwise.engine.parts.parts import EngineParts
from shardwise.engine.state.saved_tables import kinds_read_from_base


class TablesSave(NamedTuple):
    """Rows of the tables that a save holds: all, or those that changed since a full step."""

    base: BaseStep | None
    """The full step that the save continues; None if it holds all rows."""
    since: dict[str, int] | None
    """Steps that the collection of each table had done at the full step; None if the save holds all rows."""
    mark: int
    """Number of the save."""


class TableIncrements:
    """The full saves and increments of the tables of one engine.

    Args:
        parts: The running parts of the engine.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._saves = 0
        self._since: dict[int, dict[str, int]] = {}
        """Steps of the collection of each table at full saves, by the number of the save."""

    def forget(self) -> None:
        """Save all rows next, because a load has changed them."""
        self._since.clear()

    def next(self, folder: Path) -> TablesSave:
        """Decide what the next save holds of the tables. Collective."""
        parts, every = self._parts, self._parts.config.checkpoint.tables_full_every
        self._saves += 1
        if every is None or not parts.tables:
            return TablesSave(None, None, self._saves)
        full = parts.folders.at(folder).last_full()
        text = parts.folders.exchange("the full step of tables", json.dumps(full))[0]
        mark, step, sha256, increments = json.loads(text) or (0, 0, "", 0)
        since = self._since.get(mark)
        if since is not None and increments + 1 < every and step < parts.progress.step_count:
            self._since = {mark: since}
            kinds = kinds_read_from_base(parts.tables)
            return TablesSave(BaseStep(step=step, sha256=sha256, kinds=kinds), since, self._saves)
        here = [each for each in parts.tables.each() if parts.tables.is_here(each[1])]
        # The save before stays, because this one may fail in the background.
        self._since = {} if since is None else {mark: since}
        self._since[self._saves] = {name: collection.steps for name, collection, _ in here}
        return TablesSave(None, None, self._saves)
