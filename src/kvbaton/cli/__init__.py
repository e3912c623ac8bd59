"""The command line: one module per command, which only parses and prints; the work is done elsewhere."""
