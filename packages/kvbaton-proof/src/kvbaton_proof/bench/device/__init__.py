"""Device memory between two processes on one GPU, every way in one run."""
