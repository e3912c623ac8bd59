"""Sockets for transports: one loop, framed streams, sealed records, and the admission of proven peers."""
