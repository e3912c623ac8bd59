"""cuda: READ from device memory of another process of this host, by one kernel launch."""
