"""The router's dashboard: an operator's view of a cluster, bounded however busy it is.

pulse    the last three minutes in buckets: rates, times to the first byte, stage times
scene    the page's contents as values: workers, links, handoffs, failures
state    a scene as the JSON that a browser gets, within its bytes
sights   the router's records of a worker, an attempt, a failure, as such values
watch    makes scenes of the router's records, at most twice a second, for any number of viewers
pages    the page's files and their security headers
"""
