"""One engine: vLLM, its workers, its layers, and the calls into it. What is known of vLLM's insides lies in this room alone."""
