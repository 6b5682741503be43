"""Tensor and sequence parallelism: the matrices of a layer cut along "tp", the activations between them cut by tokens.

policy   the keys that users set          layout  styles, a table of them, placements of parameters; pure
tables   tables for models of transformers; pure
region   the cut sequence of a pass       layers  the cut layers        loss   cross entropy of cut logits
overlap  products in pieces, beside their exchange          apply   makes a model parallel
"""
