"""Pipeline parallelism: consecutive layers on different ranks, microbatches in between.

policy     what the user may set                 schedules  order of F and B per rank; pure
passes     add messages and Unit Actions; pure   validate   proves a schedule; pure
cost       idle time, live activations; pure
"""
