"""HTTP/1.1 of routers, workers and status pages: the server, the client of routers, and the values they share."""
