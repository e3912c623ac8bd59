"""What the adapters of vLLM and SGLang have in common: settings, identity, presence, memory, weights."""
