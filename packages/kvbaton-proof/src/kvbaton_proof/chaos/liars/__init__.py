"""Processes with a valid key that lie to engines, routers and stores."""
