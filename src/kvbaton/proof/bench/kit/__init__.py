"""What every benchmark shares: facts of a run, tables, lab pages, plots, and children spoken to in JSON."""
