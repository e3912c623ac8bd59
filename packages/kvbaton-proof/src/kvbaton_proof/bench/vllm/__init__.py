"""`kvbaton bench vllm`: aggregated vLLM, kvbaton and NixlConnector under the same load."""
