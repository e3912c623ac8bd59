"""The command line: one file a command, which parses and prints; what it does lives elsewhere."""
