"""Rows of embedding tables: in the plain loop, on the ranks of a layout, and side by side by key.

    plain loop   the collection holds whole tables on one rank, in the dtype of the loop; its own optimizer updates them
    rank         the rows that this rank holds: all columns of some keys, or some columns of all keys
    compared     each rank's part beside the same keys and columns of the plain loop's rows; keys on no rank, and keys
                 that the plain loop does not have, are wrong

Rows are no parameters of torch, so that the plain loop shares the code of row optimizers with the engine. What it does
not share is the exchange of keys and gradients, the placements and the sums over ranks.

Rows that are stored in 16 bits are stored in fp64 for the comparison in fp64, as weights are under ``precision: bf16``.
What is compared is the same; the rounding of an update to 16 bits is not, and the verdict says so.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.parallel.embedding.collection import EmbeddingCollection, collections_of
from shardwise.parallel.embedding.policy import TablesPolicy

Rows = dict[str, dict[str, Any]]
"""By table: ``keys`` [n], ``first_column``, and the columns ``weights``, one of each optimizer state, and scores."""


def full_name(collection: str, table: str) -> str:
    """Return the name of a table in its model."""
    return f"{collection}.{table}" if collection else table


def narrow_tables(model: nn.Module) -> list[str]:
    """Return the names of the tables of a model whose rows or optimizer state are stored in 16 bits."""
    return [
        full_name(prefix, table.name)
        for prefix, collection in collections_of(model).items()
        for table in collection.tables
        if "bf16" in (table.dtype, table.state_dtype)
    ]


def widen_rows(model: nn.Module) -> None:
    """Let the tables of a model store rows and optimizer state in the dtype in which updates are computed."""
    for collection in collections_of(model).values():
        collection.tables = tuple(
            table.model_copy(update={"dtype": "fp32", "state_dtype": "fp32"}) for table in collection.tables
        )


class PlainTables:
    """The collections of embedding tables of a model that trains in one plain process.

    Args:
        model: The model; its tables are placed on this process.
        dtype: The dtype of rows, gradients and vectors; None: each collection's own.
        policy: The keys under ``tables:``.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype | None, policy: TablesPolicy | None = None
    ) -> None:
        self.collections = collections_of(model)
        for collection in self.collections.values():
            if policy is not None and policy.optimizer is not None:
                collection.optimizer = policy.optimizer
            wide = torch.promote_types(dtype or collection.dtype, torch.float32)
            collection.place(dtype=wide, compute_dtype=dtype or wide, is_led=True)

    def end_passes(self) -> float:
        """Sum up the gradients of the step's passes, and return the sum of their squares."""
        squares = 0.0
        for collection in self.collections.values():
            placed = collection.placed
            placed.deliver()
            placed.settle(placed.numbers())
            squares += float(placed.square_sum())
        return squares

    def step(self, lr_factor: float, clip: float) -> None:
        """Update the rows whose vectors were used, with gradients times ``clip``."""
        for collection in self.collections.values():
            collection.step(lr_factor, 1.0 / clip)

    def rows(self) -> Rows:
        """Return all rows with their optimizer state."""
        return rows_here(self.collections)


def rows_here(collections: Mapping[str, EmbeddingCollection]) -> Rows:
    """Return the rows that this rank holds, by table."""
    found: Rows = {}
    for prefix, collection in collections.items():
        for table in collection.tables:
            rows = collection.rows_here(table.name)
            columns = {"weights": rows.weights.detach().cpu().clone()}
            columns |= {name: state.detach().cpu().clone() for name, state in rows.state.items()}
            if rows.scores is not None:
                columns["scores"] = rows.scores.cpu().double()[:, None]
            kept = {"keys": rows.keys.cpu().clone(), "first_column": rows.first_column}
            found[full_name(prefix, table.name)] = kept | {"columns": columns}
            if rows.candidates is not None:
                keys, scores = rows.candidates.cpu().unbind(1)
                waiting = {
                    "keys": keys.clone(),
                    "first_column": 0,
                    "columns": {"scores": scores.double()[:, None]},
                }
                found[f"{full_name(prefix, table.name)} waiting"] = waiting
    return found


def row_pairs(by_rank: Sequence[Rows], wanted: Rows) -> Iterator[tuple[str, str, int, Tensor, Tensor]]:
    """Yield (table, part of a row, rank, rows of the rank, the plain loop's rows of these keys).

    A part of a row is its weights, one optimizer state, or its scores. Tensors of unlike shapes mark keys that only
    one side has.
    """
    for table, truth in wanted.items():
        covered = torch.zeros(
            truth["keys"].numel(), truth["columns"].get("weights", truth["keys"][:, None]).shape[1]
        )
        order = truth["keys"].argsort()
        keys = truth["keys"][order]
        for rank, each in enumerate(by_rank):
            if table not in each:
                continue
            mine = each[table]
            place = torch.searchsorted(keys, mine["keys"]).clamp(max=max(keys.numel() - 1, 0))
            is_known = (
                keys[place] == mine["keys"]
                if keys.numel()
                else torch.zeros(mine["keys"].numel(), dtype=torch.bool)
            )
            if not bool(is_known.all()):
                extra = mine["keys"][~is_known].double()
                yield table, "keys that one process does not have", rank, extra, extra[:0]
                continue
            rows, first = order[place], mine["first_column"]
            for part, own in mine["columns"].items():
                whole = truth["columns"][part]
                is_cut = whole.shape[1] != own.shape[1]
                theirs = whole[rows][:, first : first + own.shape[1]] if is_cut else whole[rows]
                yield table, part, rank, own, theirs
                if part == "weights" or "weights" not in mine["columns"]:
                    covered[rows, first : first + own.shape[1]] = 1
        missing = keys_without(truth["keys"], covered)
        if missing.numel():
            yield table, "keys that no rank has", 0, missing[:0], missing


def same_rows(got: Rows, wanted: Rows) -> Iterator[tuple[str, str, Tensor, Tensor]]:
    """Yield (table, part of a row, rows, the other rows) of one rank in two runs of one layout."""
    nothing = torch.zeros(0, dtype=torch.int64)
    for table in [*wanted, *(each for each in got if each not in wanted)]:
        keys = [side[table]["keys"] if table in side else nothing for side in (got, wanted)]
        if not torch.equal(*keys):
            yield table, "keys", keys[0], keys[1]
            continue
        for part, rows in wanted[table]["columns"].items():
            yield table, part, got[table]["columns"][part], rows


def keys_without(keys: Tensor, covered: Tensor) -> Tensor:
    """Return the keys of which a column lies on no rank."""
    return keys[(covered == 0).any(1)].double()
