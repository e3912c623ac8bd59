"""The mutual handshake and encrypted records of TCP connections that others may read or write."""
