"""The flight recorder: the history of each handoff, seen by the router, P and D, and joined into one timeline.

records    one side's record of one handoff, bounded and typed: what crosses the wire and goes to files
recorder   makes records of the ledger's marks; the last of them are kept
report     what a worker tells the router once in a while: records and gauges
dumps      records on disk: failures, and all there is when a signal asks
gathering  all that the router knows: its own records and what workers told (`telling`, cleaned by `intake`)
journey    a request's records from all sides, on one clock (`clocks`); `joining` does the same from files
picture    a journey for the terminal
"""
