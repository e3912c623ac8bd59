"""The common parts of all transports: the interface, jobs, loans, memory, spans, and the mover."""
