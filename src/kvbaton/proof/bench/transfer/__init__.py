"""`kvbaton bench transfer`: transports beside what the machine can do and beside other libraries."""
