"""kvbaton hands the KV cache of a prompt from the engine that computed it to the engine that decodes it."""

__version__ = "0.1.0"
