"""Every path of vLLM's server, and what the router does with it: one table, from which paths, docs and tests are made.

Laws: no path of vLLM 0.33's server is missing (`tests/vllm/installed/test_route_table.py` reads the installed one's).
A path that generates from a prompt which P can compute is handed over; one that only computes goes to a D as it came;
one that changes an engine, or tells of its inside, is refused with the place where it can be asked. Nothing else is
answered: a path that is not in this table, nor a page of the router's, is 404.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping

import msgspec

from kvbaton.api.api_errors import ApiError


class Treatment(enum.StrEnum):
    """Where a request goes."""

    HANDED_OVER = "handed over"  # its prompt to P, its answer from D
    PASSED = "passed to D"  # to one worker, as it came
    ANSWERED = "answered"  # by the router itself
    REFUSED = "refused"


class ServerRoute(msgspec.Struct, frozen=True):
    """One path."""

    path: str  # with {names} in braces, as vLLM writes them
    methods: tuple[str, ...]
    treatment: Treatment
    note: str  # what it is for; of a refused one why, and what to do instead
    is_form: bool = False  # takes multipart/form-data instead of JSON


_GET, _POST = ("GET",), ("POST",)
_ONE_ENGINE = "it changes one engine; ask that worker itself (/workers has its address) over a network of its own"
_INSIDE = "it tells of one engine's inside; ask that worker itself (/workers has its address)"
_STATELESS = "answers are not kept here; send the conversation as input"
_TRAINING = "weights are changed while nothing is served; ask each worker itself, and drain it first"
_LORA = "adapters are loaded into all workers alike; give them to each vLLM server (--lora-modules)"
_DRAWN = "the router has no page for it; /openapi.json has the description, which any viewer reads"


def _of(treatment: Treatment, methods: tuple[str, ...], note: str, *paths: str) -> list[ServerRoute]:
    return [ServerRoute(path, methods, treatment, note) for path in paths]


ROUTES: tuple[ServerRoute, ...] = (
    *_of(Treatment.HANDED_OVER, _POST, "OpenAI's completions", "/v1/completions"),
    *_of(Treatment.HANDED_OVER, _POST, "OpenAI's chats", "/v1/chat/completions"),
    *_of(Treatment.HANDED_OVER, _POST, "OpenAI's responses", "/v1/responses"),
    *_of(Treatment.HANDED_OVER, _POST, "Anthropic's messages", "/v1/messages"),
    *_of(Treatment.HANDED_OVER, _POST, "SageMaker: a chat or a completion, by its fields; others are passed to D",
         "/invocations"),
    *_of(Treatment.PASSED, _POST, "tokens of a text, and back", "/tokenize", "/detokenize"),
    *_of(Treatment.PASSED, _GET, "the tokenizer's configuration, where vLLM tells it", "/tokenizer_info"),
    *_of(Treatment.PASSED, _POST, "the length of a conversation, in tokens", "/v1/messages/count_tokens"),
    *_of(Treatment.PASSED, _POST, "embeddings", "/v1/embeddings", "/v2/embed"),
    *_of(Treatment.PASSED, _POST, "pooling models", "/pooling", "/classify"),
    *_of(Treatment.PASSED, _POST, "scores of texts", "/score", "/v1/score", "/generative_scoring"),
    *_of(Treatment.PASSED, _POST, "texts in order of their score", "/rerank", "/v1/rerank", "/v2/rerank"),
    *[ServerRoute(path, _POST, Treatment.PASSED, "speech to text", is_form=True)
      for path in ("/v1/audio/transcriptions", "/v1/audio/translations")],
    *_of(Treatment.PASSED, _POST, "several chats in one body; D computes their prompts", "/v1/chat/completions/batch"),
    *_of(Treatment.PASSED, _POST, "Cohere's chats; D computes their prompts", "/cohere/v2/chat"),
    *_of(Treatment.PASSED, _POST, "structured decisions; D computes their prompts", "/v1/systemone",
         "/v1/decisions"),
    *_of(Treatment.PASSED, _POST, "tokens in, tokens out; D computes the prompt", "/inference/v1/generate"),
    *_of(Treatment.PASSED, _POST, "a body as the tokens that an engine would get", "/v1/completions/render",
         "/v1/chat/completions/render", "/v1/responses/render", "/v1/messages/render", "/cohere/v2/chat/render"),
    *_of(Treatment.PASSED, _POST, "an engine's tokens as an answer", "/v1/completions/derender",
         "/v1/chat/completions/derender"),
    *_of(Treatment.ANSWERED, _GET, "200 while requests are served (degraded: by D alone), else 503 and why", "/health"),
    *_of(Treatment.ANSWERED, ("GET", "POST"), "the same, where SageMaker looks for it", "/ping"),
    *_of(Treatment.ANSWERED, _GET, "the workers' version, and kvbaton's", "/version"),
    *_of(Treatment.ANSWERED, _GET, "what is served, as a worker says", "/v1/models"),
    *_of(Treatment.ANSWERED, _GET, "requests under way in the router", "/load"),
    *_of(Treatment.ANSWERED, _GET, "Prometheus", "/metrics"),
    *_of(Treatment.ANSWERED, _GET, "the API's description: a worker's, less what the router does not answer",
         "/openapi.json"),
    *_of(Treatment.REFUSED, _GET, _DRAWN, "/docs", "/docs/oauth2-redirect", "/redoc", "/static"),
    *_of(Treatment.REFUSED, _GET, _STATELESS, "/v1/responses/{response_id}"),
    *_of(Treatment.REFUSED, _POST, f"{_STATELESS}; closing the connection cancels a request",
         "/v1/responses/{response_id}/cancel"),
    *_of(Treatment.REFUSED, _POST, "closing its connection aborts a request", "/abort_requests",
         "/inference/v1/abort_requests"),
    *_of(Treatment.REFUSED, _GET, "WebSockets are not carried; send whole recordings to /v1/audio/transcriptions",
         "/v1/realtime"),
    *_of(Treatment.REFUSED, _POST, _LORA, "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters"),
    *_of(Treatment.REFUSED, ("DELETE",), _LORA, "/adapters/{adapter_name}"),
    *_of(Treatment.REFUSED, _POST, _ONE_ENGINE, "/sleep", "/wake_up", "/release_kv_cache_memory", "/pause", "/resume",
         "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/collective_rpc", "/start_profile",
         "/stop_profile", "/scale_elastic_ep", "/fault_tolerance/apply"),
    *_of(Treatment.REFUSED, _POST, _INSIDE, "/is_scaling_elastic_ep"),
    *_of(Treatment.REFUSED, _GET, _INSIDE, "/server_info", "/is_sleeping", "/is_paused", "/kv_event_sources",
         "/fault_tolerance/status", "/get_world_size"),
    *_of(Treatment.REFUSED, _POST, _TRAINING, "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine",
         "/start_weight_update", "/start_draft_weight_update", "/update_weights", "/finish_weight_update",
         "/update_weight_version", "/weight_checker"),
    *_of(Treatment.REFUSED, _GET, _TRAINING, "/weight_info"),
)  # fmt: skip
"""In the order in which docs/router.md shows them."""

BY_PATH: Mapping[str, ServerRoute] = {route.path: route for route in ROUTES}
_REFUSED = {path: route for path, route in BY_PATH.items() if route.treatment is Treatment.REFUSED}
_TEMPLATES = [
    (re.compile(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(path))), route)
    for path, route in _REFUSED.items()
    if "{" in path
]


def of(treatment: Treatment) -> list[ServerRoute]:
    """Those that are treated so."""
    return [route for route in ROUTES if route.treatment is treatment]


def refusal(path: str) -> ApiError | None:
    """What a client is told who asks for a path that the router knows and does not serve, whatever the method."""
    route = _REFUSED.get(path) or next((found for form, found in _TEMPLATES if form.fullmatch(path)), None)
    if route is None:
        return None
    return ApiError(
        403, f"{path[:200]}: not through the router: {route.note}", type="permission_error", code="not_here"
    )
