"""The codes that an HTTP answer of the router or of a worker can bear in `error.code`, besides the reasons.

Law: `tests/cli/test_explain.py` finds every code that the sources can answer; none is missing here, none too many.
"""

from __future__ import annotations

from kvbaton.codes.entry import Entry, Who, api

CALLER, OPERATOR, MAKERS = Who.CALLER, Who.OPERATOR, Who.MAKERS
WORKERS = ("curl ROUTER/workers: who is listed, and in which state",)
INSPECT = ("kvbaton inspect REQUEST, with the id in the answer's x-request-id",)

CODES: tuple[Entry, ...] = (
    api("bad_answer", 502, OPERATOR, "A worker answered something that cannot be used.",
        "read its log at that time", "see that it serves the OpenAI API and has a KV connector",
        causes=("the worker is no OpenAI server", "P has no BatonConnector, so it answers without kv_transfer_params",
                "a proxy between router and worker changed the answer"), look=INSPECT),
    api("bad_request", 400, CALLER, "What came was not HTTP/1.1.",
        "see that the client speaks plain HTTP to this port, not TLS and not HTTP/2"),
    api("body_timeout", 408, CALLER, "The body of a request was not complete in time.",
        "send the body faster, or see what holds it up between client and router"),
    api("body_too_large", 413, CALLER, "The body is larger than the bound in the message.",
        "send less"),
    api("deadline", 504, OPERATOR, "The request was not answered within the router's time for it.",
        "see in the timeline which stage took so long", "add workers, or give requests more time",
        causes=("the workers are overloaded", "a worker is stopped"), look=INSPECT),
    api("draining", 503, OPERATOR, "This router is stopping and takes no new request.",
        "ask another router, or wait for its successor"),
    api("encoded_body", 415, CALLER, "The body comes compressed, which is not taken.",
        "send it as it is: no Content-Encoding, and no Transfer-Encoding but chunked"),
    api("foreign_origin", 403, CALLER, "A web page of another site asked, by the Origin that a browser sent.",
        "ask from a page of the same origin, or from no browser",
        "start the router with --allow-origin for a page that may ask",
        causes=("a page somewhere uses whoever visits it to reach this port",
                "a proxy before the router changes Host: let it keep the client's")),
    api("full", 429, OPERATOR, "Too much is under way; the same request may pass later.",
        "let clients wait for Retry-After and repeat", "add workers if it lasts",
        causes=("more requests at once than the router's bounds allow",), look=("queue lengths on /dashboard",)),
    api("headers_timeout", 408, CALLER, "The headers of a request were not complete in time.",
        "see what holds the client up; an idle connection should send nothing at all"),
    api("headers_too_large", 431, CALLER, "The headers are larger than the bound in the message.",
        "send fewer or shorter headers"),
    api("internal", 500, MAKERS, "A bug: something was raised that nobody expected.",
        "look for [request-crashed] or [stream-crashed] in the log, and report it with the trace"),
    api("invalid_json", 400, CALLER, "The body is not a JSON object.",
        "send a JSON object with Content-Type: application/json"),
    api("invalid_value", 400, CALLER, "One field of the body cannot be meant.",
        "read the message: it opens with the field's name and says what was expected"),
    api("method_not_allowed", 405, CALLER, "The path exists, but not with this method.",
        "use the method in the message; for chat and completions it is POST"),
    api("model_not_found", 404, CALLER, "No worker here serves that model.",
        "use one of the names in the message; curl ROUTER/v1/models lists them"),
    api("no_pair", 503, OPERATOR, "No P and D that could serve this mode are there now.",
        "see which side is missing: the message counts them", "start a worker of that role, or wait until one is back",
        causes=("a role has no worker", "all of a role are draining, suspect or broken",
                "no pair has the mode that was asked for"), look=WORKERS),
    api("no_worker", 503, OPERATOR, "No worker is there at all.",
        "start workers with this router's registry: kvbaton worker, or vLLM with BatonConnector", look=WORKERS),
    api("not_found", 404, CALLER, "There is no such path.",
        "see the message for the paths that there are"),
    api("not_the_router", 401, OPERATOR, "The worker takes requests from its cluster's router only.",
        "ask the router instead", "if the router itself gets this: copy tickets.json to both hosts",
        causes=("a client asked a worker directly", "router and worker have different tickets.json")),
    api("operators_only", 403, OPERATOR, "The page is for operators, and is shown on the router's own machine only.",
        "ask there, or start the router with --operator-pages open where only operators reach it"),
    api("worker_died", 502, OPERATOR, "A worker went away before its answer was complete.",
        "see why it ended: its log's last lines, and the kernel's (OOM)", "repeat the request; others serve meanwhile",
        look=(*INSPECT, *WORKERS)),
    api("worker_failed", 502, OPERATOR, "A worker answered with an error of its own.",
        "read the message, which quotes it, and the worker's log", look=INSPECT),
    api("worker_left", 502, OPERATOR, "A worker left the list while its answer was waited for.",
        "repeat the request", "if nobody stopped it, see its log for [registry-silent]", look=WORKERS),
    api("worker_timeout", 504, OPERATOR, "A worker gave no answer in time.",
        "see whether it is overloaded or stopped: curl http://WORKER/health", look=(*INSPECT, *WORKERS)),
    api("worker_unreachable", 502, OPERATOR, "The router cannot connect to a worker.",
        "see that http_address is what the router can reach, and that a firewall lets it pass",
        causes=("the worker is gone, and still listed for a few seconds", "http_address is wrong"), look=WORKERS),
)  # fmt: skip
