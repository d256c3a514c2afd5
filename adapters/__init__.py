"""The adapter itself: identity, storage, registry, publish contract and node cache.

Importing this package is cheap and loads no web framework, Ray, vLLM or torch; a test proves it.
"""
