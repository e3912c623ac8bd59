"""`kvbaton bench router`: the router beside vllm-router and a toy proxy."""
