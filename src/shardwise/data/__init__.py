"""Training data: from text and datasets to the microbatches of every rank.

``build`` opens what ``data:`` names, ``Loader`` yields training batches, ``evaluation_batches`` yields the others;
``convert`` makes token files.
"""

from shardwise.data.build import TextCorpus, build
from shardwise.data.evaluation import WeightedBatch, evaluation_batches
from shardwise.data.loader import Loader
from shardwise.data.policy import DataPolicy
from shardwise.data.sampler import BatchShare, Sampler
from shardwise.data.text import convert
from shardwise.data.token_file import TokenFile
from shardwise.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from shardwise.data.windows import TokenWindows

__all__ = [
    "ByteTokenizer",
    "TextCorpus",
    "DataPolicy",
    "Loader",
    "Sampler",
    "BatchShare",
    "TokenFile",
    "Tokenizer",
    "WeightedBatch",
    "TokenWindows",
    "build",
    "convert",
    "evaluation_batches",
    "load_tokenizer",
]
