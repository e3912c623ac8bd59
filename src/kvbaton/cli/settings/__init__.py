"""Settings of the commands that serve: from flags, the environment and a file."""
