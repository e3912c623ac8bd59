"""The memory layout of an engine's KV, and which bytes move where between engines of different shape."""
