"""The standard plan of faults on a real vLLM pair."""
