"""tcp: READ and WRITE between any two hosts over sockets of our own."""
