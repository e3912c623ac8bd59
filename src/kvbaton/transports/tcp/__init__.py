"""tcp: READ and WRITE between any two hosts over our own sockets."""
