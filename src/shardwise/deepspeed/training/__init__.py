"""What a DeepSpeed script drives: engines, optimizers, schedules, pipelines, experts and their settings."""
