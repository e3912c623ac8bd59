"""How vLLM is started, and what goes with it."""
