"""`kvbaton bench router`: the router compared with vllm-router and a toy proxy."""
