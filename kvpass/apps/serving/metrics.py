"""Count the server's requests, tokens and times, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvpass.apps.serving.conversations import ConversationStore

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The metrics of one server, in their own registry.

    Attributes:
        requests: requests by how they ended: "stop", "length", "cancelled", "error", "refused" or "rejected".
        evicted: tokens that left the slots of requests that have ended, the mean over layers and heads.
        first_token: seconds from a request to its first token.
        step: seconds of a call of `DecodeLoop.step`.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        tokens = Counter("kvpass_tokens", "Tokens read and generated.", ["kind"], registry=self.registry)
        self.prompt_tokens, self.generated_tokens = tokens.labels("prompt"), tokens.labels("generated")
        self.requests = Counter("kvpass_requests", "Requests by their end.", ["end"], registry=self.registry)
        self.evicted = Counter("kvpass_evicted_tokens", "Tokens evicted, when a request ends.", registry=self.registry)
        self.first_token = self._histogram("kvpass_first_token_seconds", "From a request to its first token.")
        self.step = self._histogram("kvpass_step_seconds", "A prefill of one chunk, decode steps of all rows, or both.")
        self.cached_tokens = Gauge("kvpass_slots_held", "Tokens in the slots of rows in use.", registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=SECONDS, registry=self.registry)

    def _gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        Gauge(name, text, registry=self.registry).set_function(value)

    def watch(self, rows: int, slots: int, requests: Callable[[], int], store: ConversationStore) -> None:
        """Report the rows, their slots, the queue, and the conversations whenever the metrics are read."""
        self._gauge("kvpass_rows", "Rows for requests.", lambda: rows)
        self._gauge("kvpass_rows_used", "Rows with a request.", lambda: min(requests(), rows))
        self._gauge("kvpass_queue", "Requests that wait for a row.", lambda: max(0, requests() - rows))
        self._gauge("kvpass_slots", "Tokens that the rows can hold.", lambda: slots)
        self._gauge("kvpass_conversations", "Conversations, in memory and in files.", lambda: len(store))
        self._gauge("kvpass_conversations_in_memory", "Conversations in memory.", lambda: store.in_memory)
        self._gauge("kvpass_conversation_bytes", "Bytes of conversations in memory.", lambda: store.nbytes)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)
