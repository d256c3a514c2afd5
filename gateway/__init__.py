"""The door: OpenAI over HTTP. Resolves names, relays streams, turns errors into OpenAI's shape. Knows neither Ray nor vLLM."""
