"""What a run says about itself: numbers per step, where they are written, the terminal, the logs."""
