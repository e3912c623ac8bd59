"""Sockets for transports: one loop, framed streams, encrypted records, and peer authentication."""
