"""Checkers: what must hold after every step, and at the end."""
