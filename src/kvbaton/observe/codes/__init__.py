"""Every word by which kvbaton says that something went wrong, and what to do about each.

Law: data only. A reason, an error code of the API, a code in a log line and a finding of `kvbaton doctor` each have one
entry; tests hold the entries to the code that says them, both ways. Start at `catalogue.find`.
"""
