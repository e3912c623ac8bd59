"""vLLM's KV cache in memory: its kinds, its layout, its layers' events."""
