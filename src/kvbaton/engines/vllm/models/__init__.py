"""Small models of random weights, made here for tests and demonstrations."""
