from __future__ import annotations

from kvbaton.engines.embedded.hooks import Connector, LoadOrder, Nothing, NotYet, NullConnector

from .helpers import engine, finish, prompt, request


def test_the_null_connector_has_every_hook() -> None:
    connector: Connector = NullConnector()
    hooks = {name for name in vars(Connector) if not name.startswith("_")}
    assert hooks <= {name for name in dir(connector) if not name.startswith("_")}


def test_answers_to_match_are_values() -> None:
    assert LoadOrder(3) == LoadOrder(3) != LoadOrder(4)
    assert NotYet() == NotYet()
    assert Nothing() == Nothing()


def test_hooks_are_called_in_the_order_that_is_documented() -> None:
    calls: list[str] = []

    class Noting(NullConnector):
        wants_layers = True

        def __getattribute__(self, name: str) -> object:
            found = object.__getattribute__(self, name)
            if callable(found) and not name.startswith("_"):
                calls.append(name)
            return found

    subject = engine(connector=Noting())
    assert calls == ["bind"]
    calls.clear()
    subject.add_request(request("a", prompt(1, 9), 1))
    finish(subject)
    one_step = [
        *("on_new_request", "step_begin", "take_reports", "match", "allocated"),
        *("layer_done", "layer_done", "chunk_done", "ending", "request_finished"),
    ]
    assert calls == [*one_step, "step_begin", "take_reports"]
