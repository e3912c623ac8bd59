"""Lies of members with a valid key, derived from the types of messages: told by simulated members and by real ones."""
