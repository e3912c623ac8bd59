"""What is configured of an engine with the connector, and what of it is supported."""
