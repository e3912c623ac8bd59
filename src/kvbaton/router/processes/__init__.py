"""One router made of several processes on one port: a parent that knows, and children that serve.

parent          finds workers, probes them, keeps what is told of requests, answers operators, restarts children
children        answer clients; each has connections of its own, to clients and to workers
link            a socket between the parent and each child: who the workers are, what became of requests
shared counts   memory of all: load of workers, requests under way, bytes held, connections, seen prefixes
shared turns    in the same memory: conversations of which a decode worker keeps a turn

Laws: an operator sees one router, whichever child is asked. Bounds are those of the whole router. A child that ends
takes its own requests with it and nothing else, and another takes its place; a parent that ends takes its children with
it. Nothing on the way of a request waits for another process.
"""
