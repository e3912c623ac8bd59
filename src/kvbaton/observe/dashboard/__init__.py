"""The router's dashboard: an operator's view of a cluster, bounded however busy it is.

pulse    the last three minutes in buckets: rates, times to the first byte, stage times
scene    what the page is made of, as values: workers, links, handoffs, failures
state    a scene as the JSON that a browser gets, within its bytes
sights   what the router knows of a worker, a try, a failure, as such values
watch    makes scenes of what the router gathers, twice a second at most, whoever looks
pages    the page's files, and the headers that keep everything else out of it
"""
