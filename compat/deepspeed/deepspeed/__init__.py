"""Shardwise under the name of DeepSpeed, wherever this distribution is installed."""

from shardwise.deepspeed.importer import answer_as

answer_as(__name__)
