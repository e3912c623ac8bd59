"""What vLLM's KV is of: model, weights, adapters, drafters, a request's content."""
