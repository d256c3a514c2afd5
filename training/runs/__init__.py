"""A training run: its loop, checkpoints and resumption, evaluation, events, what the terminal shows, and the report."""
