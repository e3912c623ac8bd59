"""Where an engine's KV lies, and which bytes go where between engines of different shape."""
