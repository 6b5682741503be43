"""Row 7: Plan + model -> running parts; the training step; the engine that users hold."""
