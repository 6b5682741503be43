"""Folders of Hugging Face, exported vectors, tokenizers and metrics: what others, or a crash, may have left."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from shardwise.data.tokenizer import load_tokenizer
from shardwise.models.export import write_huggingface
from shardwise.models.gpt import Gpt, GptPolicy
from shardwise.models.source import gpt_policy_from_huggingface, open_weights
from shardwise.models.vectors import StoredTable, Vectors, write_vectors
from shardwise.observe.metrics import MetricsFile, StepRecord
from shardwise.observe.metrics import read as read_metrics

from .trial import RAW_JSON, Case, Kind, of_bytes, of_json

POLICY = GptPolicy(layers=1, width=16, heads=2, context=16, vocab=32)


def json_cases(name: str, file: str, count: int, may_differ: bool) -> Iterator[Case]:
    """Damage to one JSON file of a folder."""

    def of(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
        def damage(folder: Path) -> None:
            (folder / file).write_bytes(change((folder / file).read_bytes()))

        return damage

    for number, raw in enumerate(RAW_JSON):
        yield Case(f"{file} raw {number}", of(lambda data, raw=raw: raw))
    for number in range(count):
        draws = random.Random(f"{name} {number}")
        if number % 3 == 0:
            case = of_bytes(draws, lambda folder: folder / file)
            yield case._replace(name=f"{file}: {case.name}", may_differ=may_differ)
        else:

            def change(data: bytes, draws: random.Random = draws) -> bytes:
                return json.dumps(of_json(draws, json.loads(data))[1]).encode()

            yield Case(f"{file}, edit {number}", of(change), may_differ)


def make_huggingface(folder: Path) -> Path:
    torch.manual_seed(0)
    write_huggingface(folder, POLICY, ((n, p.detach()) for n, p in Gpt(POLICY).named_parameters()))
    return folder


def read_huggingface(folder: Path) -> Any:
    policy = gpt_policy_from_huggingface(folder)
    source = open_weights(folder, policy)
    return [source.read(n, 0, torch.Size(source.shape(n)).numel()).tolist() for n in sorted(source.names())]


def make_index(folder: Path) -> Path:
    make_huggingface(folder)
    names = {name: "model.safetensors" for name in open_weights(folder).names()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


def make_vectors(folder: Path) -> Path:
    keys, vectors = torch.arange(20) * 7, torch.arange(60.0).view(20, 3)
    write_vectors(folder, [StoredTable("t", 20, 3, True, lambda: iter([(0, keys, vectors)]))], 5)
    return folder


def read_vectors(folder: Path) -> Any:
    vectors = Vectors(folder)
    return vectors.step, vectors.lookup("t", torch.arange(0, 140, 7)).tolist()


def cases_vectors(count: int) -> Iterator[Case]:
    for case in json_cases("vectors", "tables.json", count, may_differ=False):
        yield case._replace(
            may_differ="edit" in case.name or "flip" in case.name
        )  # the step is a free number


def make_tokenizer(folder: Path) -> Path:
    words = {word: number for number, word in enumerate(["[UNK]", "a", "b", "ab", "c"])}
    content = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def read_tokenizer(folder: Path) -> Any:
    tokenizer = load_tokenizer(str(folder))
    return tokenizer.vocab_size, tokenizer.encode("a b ab x")


def cases_tokenizer(count: int) -> Iterator[Case]:
    for case in json_cases("tokenizer", "tokenizer.json", count, may_differ=True):
        yield case._replace(may_differ=True)  # its sum is its name: another file is another tokenizer


def make_metrics(folder: Path) -> Path:
    sink = MetricsFile(folder / "metrics.csv")
    for step in range(1, 6):
        values = {name: None for name in StepRecord._fields}
        sink.write(StepRecord(**{**values, "step": step, "loss": 1 / step}))  # type: ignore[arg-type]
    sink.close()
    return folder / "metrics.csv"


def read_metrics_again(path: Path) -> Any:
    return read_metrics(path)


def cases_metrics(count: int) -> Iterator[Case]:
    for number in range(count):
        yield of_bytes(random.Random(f"metrics {number}"))._replace(
            may_differ=True
        )  # plain text without a sum


KINDS = (
    Kind("huggingface", make_huggingface, read_huggingface,
         lambda count: json_cases("huggingface", "config.json", count, may_differ=True)),
    Kind("index", make_index, read_huggingface,
         lambda count: json_cases("index", "model.safetensors.index.json", count, may_differ=False)),
    Kind("vectors", make_vectors, read_vectors, cases_vectors),
    Kind("tokenizers", make_tokenizer, read_tokenizer, cases_tokenizer),
    Kind("metrics", make_metrics, read_metrics_again, cases_metrics),
)  # fmt: skip
