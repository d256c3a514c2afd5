"""Serving: everything that knows Ray and serves with vLLM."""
