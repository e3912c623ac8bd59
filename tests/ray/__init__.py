"""kvbaton under a real Ray Serve with real vLLM engines: `make ray-test`. Not part of `make test`."""
