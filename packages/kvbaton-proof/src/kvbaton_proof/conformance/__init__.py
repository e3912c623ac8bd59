"""Holds the connector to vLLM's own scheduler: real scheduler, block pool and aggregator, real tensors, no model."""
