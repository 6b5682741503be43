"""Serving of click-through models without an engine: no process group, no optimizer, no training.

export       a checkpoint as a folder of vectors and dense parameters
dense_model  the dense part as a module
collection   a collection of tables whose vectors come from files
hot_rows     vectors that are asked for often
scorer       logits for batches
programs     the dense part as ONNX
"""
