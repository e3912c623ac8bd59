"""shm: shared memory between processes of one host; the receiver copies."""
