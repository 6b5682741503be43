"""Tensor and sequence parallelism: the matrices of a layer cut along "tp", and what lies between them by tokens.

policy   what the user may set            layout  styles, a table of them, places of parameters; pure
cost     bytes and collectives; pure      tables  tables of models that are not ours; pure
region   the cut sequence of a pass       layers  the cut layers        loss   cross entropy of cut logits
apply    makes a model parallel
"""
