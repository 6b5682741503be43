"""The parts that the phases of a step share: passes under way, accumulation, tables, inputs, metrics and folders."""
