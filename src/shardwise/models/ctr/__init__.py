"""Click-through models: a dense network beside one embedding table for each feature.

policy       the keys under ``model:``                 model        the shared base: batch, loss, initial weights
tables       the tables that follow from features      build        the model of a policy and columns
logistic_regression  wide_deep  deepfm  dcn  dlrm             one model each
"""
