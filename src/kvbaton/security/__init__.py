"""Records: how bytes cross a TCP connection that somebody else may listen to, or write into."""
