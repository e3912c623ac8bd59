"""Errors whose message is the whole line that the operator of a command reads, with the next step.

Law: nothing is imported here, so that `--help` and typing mistakes are answered at once.
"""


class CommandError(Exception):
    """The operator must act; the message is the whole line."""


class StoppedError(Exception):
    """The operator stopped the command before it was done."""
