"""One rig for real vLLMs: servers alone or in pairs with any connector, a client, an oracle, meters, a record.

connectors  contenders as data: what makes a P and a D of each, and how each counts what it hands over
servers     groups of servers by specification: started at once, gone afterwards; server: one of them, as a process
client      requests: one leg, both legs, streamed; and what became of them
oracle      what one engine alone answers, and how sure it is of it; wrong answers looked into
meters      what engines say of themselves
record      verdicts, tables and notes, on disk at any time; and the page made of them
"""
