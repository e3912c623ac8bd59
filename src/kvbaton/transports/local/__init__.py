"""Regions of one host's memory passed between processes over UNIX sockets."""
