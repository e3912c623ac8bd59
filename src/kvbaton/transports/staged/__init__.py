"""staged: device memory through pinned memory of the host."""
