"""Checks of a machine, configurations and running clusters, each finding with its remedy."""
