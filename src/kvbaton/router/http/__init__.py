"""HTTP/1.1 for the router: the server for clients, the client for workers, and the values they share."""
