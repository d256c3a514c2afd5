"""The places of one engine: who sits there, who waits, who goes."""
