"""`kvbaton bench transfer`: transports compared with the machine's limits and with other libraries."""
