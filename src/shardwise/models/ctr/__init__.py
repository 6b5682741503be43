"""Click-through models: a dense network beside one embedding table for each feature.

policy       what stands under ``model:``         model        what all share: batch, loss, start weights
tables       the tables that follow from features build        from policy and columns to the model
interaction  dot products of all pairs
logistic_regression  wide_deep  deepfm  dcn  dlrm             one model each
"""
