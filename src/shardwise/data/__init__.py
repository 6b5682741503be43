"""Training data: from text and datasets to the microbatches of every rank.

``build`` opens what ``data:`` names, ``Loader`` yields training batches, ``evaluation_batches`` yields the others;
``convert`` makes token files.
"""

from shardwise.data.build import Corpus, build
from shardwise.data.evaluation import Weighted, evaluation_batches
from shardwise.data.loader import Loader
from shardwise.data.policy import DataPolicy
from shardwise.data.sampler import Sampler, Share
from shardwise.data.text import convert
from shardwise.data.token_file import TokenFile
from shardwise.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from shardwise.data.windows import Windows

__all__ = [
    "ByteTokenizer",
    "Corpus",
    "DataPolicy",
    "Loader",
    "Sampler",
    "Share",
    "TokenFile",
    "Tokenizer",
    "Weighted",
    "Windows",
    "build",
    "convert",
    "evaluation_batches",
    "load_tokenizer",
]
