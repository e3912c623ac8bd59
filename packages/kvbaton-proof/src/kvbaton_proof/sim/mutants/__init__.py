"""Mutants of the product: written by hand, generated, hunted and surveyed."""
