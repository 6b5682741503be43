"""DeepSpeed's checkpoints, and its views of partitioned parameters, read and written."""
