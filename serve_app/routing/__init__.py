"""Which replica answers."""
