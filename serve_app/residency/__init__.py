"""What a replica holds and should hold, and what all of them hold together."""
