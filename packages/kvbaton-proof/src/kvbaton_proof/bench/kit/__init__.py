"""Parts shared by all benchmarks: facts of a run, tables, lab pages, plots, and child processes driven by JSON."""
