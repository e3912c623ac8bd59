"""The parts every transport is made of: the interface, jobs, loans, memory, spans, and the mover."""
