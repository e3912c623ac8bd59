"""The flight recorder: the history of each handoff, seen by the router, P and D, and joined into one timeline.

records    one side's record of one handoff, bounded and typed: what crosses the wire and goes to files
recorder   makes records from the ledger's marks, and keeps the latest
report     a worker's periodic report to the router: records and gauges
dumps      records on disk: failures, and all of them on a signal
gathering  all records of the router: its own and the workers' (`telling`, cleaned by `intake`)
journey    a request's records from all sides, on one clock (`clocks`); `joining` does the same from files
picture    a journey for the terminal
"""
