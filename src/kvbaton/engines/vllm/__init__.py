"""vLLM's adapter: the connector's scheduler side and worker side."""
