"""Pipeline parallelism: consecutive layers on different ranks, microbatches in between.

policy     the keys that users set                      schedules  order of F and B per rank; pure
passes     add messages and Unit Actions; pure
partition  which block begins each stage; pure          cut        stages out of a whole module
block_seconds  measured seconds of blocks, in a file
layers     a model as a list of layers                  stand_in   replacements of parts on other stages
messages   pytrees as text and tensors
"""
