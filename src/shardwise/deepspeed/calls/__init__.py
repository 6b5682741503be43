"""DeepSpeed's single functions: collectives, devices, groups, logs, random streams and launching."""
