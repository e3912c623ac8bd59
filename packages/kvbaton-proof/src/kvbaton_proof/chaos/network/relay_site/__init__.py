"""Stands first in PYTHONPATH of the members of a relay's network, so that `sitecustomize` here is theirs."""
