"""Models to try the product with: adapters that each say their own sentence, and small bases for tests and benchmarks."""
