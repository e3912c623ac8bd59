"""The OpenAI surface that router and workers share: bodies in, answers and events out.

Law: nothing here knows of a router or an engine, and only `http` knows of sockets; so both may import it.
"""
