"""Evaluation: every validation sample exactly once over all ranks, whatever their number.

The samples are cut into blocks of one micro batch, the last possibly shorter; block k goes to data-parallel rank
k mod dp. All ranks run the same number of rounds, because a collective in the model waits for all of them; a rank
without a block in the last round gets a block with weight 0 (of a BatchedDataset an empty one). The mean over the set
is

    sum over ranks and batches of weight · loss  /  sum of weight
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from shardwise.base.errors import DataError
from shardwise.base.ragged import samples_in
from shardwise.data.adopt import Collate, IterableData, MapStyleData, adopt
from shardwise.data.batched import BatchedDataset, evaluation_blocks
from shardwise.data.draws import GeneratorContext
from shardwise.data.feed import read_stream
from shardwise.data.placed import PositionedSample
from shardwise.data.sampler import key_of


class WeightedBatch(NamedTuple):
    """A batch and the number of samples that count in it; 0 for a batch that only fills up the round."""

    batch: Any
    weight: int


def evaluation_batches(
    data: Any,
    dp_index: int,
    dp_size: int,
    micro_batch: int,
    *,
    collate_fn: Collate | None = None,
    workers: int = 0,
    samples: int | None = None,
    seed: int = 0,
) -> Iterator[WeightedBatch]:
    """Yield this rank's batches of one evaluation, as many as on every other rank.

    Args:
        data: validation data, of any kind that ``Loader`` takes.
        dp_index: data-parallel rank.
        dp_size: number of data-parallel ranks.
        micro_batch: samples of one batch.
        collate_fn: joins samples to a batch; None takes torch's, or that of a DataLoader.
        workers: processes that read ahead.
        samples: largest number of samples: evenly spread over a dataset, or the first of a stream. None takes all.
        seed: seed of the random numbers that samples draw.

    Raises:
        DataError: if the data is empty.
    """
    if isinstance(data, BatchedDataset):
        return (
            WeightedBatch(*each) for each in evaluation_blocks(data, dp_index, dp_size, micro_batch, samples)
        )
    adopted = adopt(data, collate_fn, workers, shuffle=False)
    if isinstance(adopted, MapStyleData):
        return _of_map(adopted, dp_index, dp_size, micro_batch, samples, seed)
    return _of_stream(adopted, dp_index, dp_size, micro_batch, samples, seed)


def _of_map(
    data: MapStyleData, dp_index: int, dp_size: int, micro_batch: int, samples: int | None, seed: int
) -> Iterator[WeightedBatch]:
    size = min(samples or data.size, data.size)
    places = [PositionedSample(i, i * data.size // size) for i in range(size)]
    blocks = [places[start : start + micro_batch] for start in range(0, size, micro_batch)]
    mine = range(dp_index, -(-len(blocks) // dp_size) * dp_size, dp_size)
    chosen = [blocks[k] if k < len(blocks) else blocks[0] for k in mine]
    weights = [len(blocks[k]) if k < len(blocks) else 0 for k in mine]
    yield from map(WeightedBatch, data.batches(chosen, key_of("evaluation", seed)), weights)


def _of_stream(
    data: IterableData, dp_index: int, dp_size: int, micro_batch: int, samples: int | None, seed: int
) -> Iterator[WeightedBatch]:
    held: WeightedBatch | None = None
    filler: WeightedBatch | None = None
    k = -1
    for k, block in enumerate(_stream_blocks(data, micro_batch, samples, seed)):
        if k % dp_size == 0:
            filler, held = block, None
        if k % dp_size == dp_index:
            held = block
        if k % dp_size == dp_size - 1 and held is not None:
            yield held
    if k < 0 or filler is None:
        raise DataError("the validation stream is empty; give one that holds samples")
    if k % dp_size != dp_size - 1:
        yield held if held is not None else WeightedBatch(filler.batch, 0)


def _stream_blocks(
    data: IterableData, micro_batch: int, samples: int | None, seed: int
) -> Iterator[WeightedBatch]:
    key = key_of("evaluation", seed)
    seen = 0
    held: list[Any] = []
    for item in read_stream(data.source, key, 0):
        if samples is not None and seen >= samples:
            break
        if data.holds_batches:
            size = samples_in(item)
            seen += 1 if size is None else size
            yield WeightedBatch(item, 1 if size is None else size)
            continue
        held.append(item)
        seen += 1
        if len(held) == micro_batch:
            yield _collated(data, held, key_of("collate", key, seen))
            held = []
    if held:
        yield _collated(data, held, key_of("collate", key, seen))


def _collated(data: IterableData, held: list[Any], key: int) -> WeightedBatch:
    with GeneratorContext(key):
        return WeightedBatch(data.collate(held), len(held))
