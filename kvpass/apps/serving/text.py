"""Turn generated tokens into text as they come, and end it at stop texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"
"""The character that a tokenizer makes of bytes that are not a whole character."""

CONTEXT = 8  # tokens of a prompt that are decoded with the first ones after it


class TextStream:
    """The text of one choice, piece by piece; the pieces joined do not depend on how the tokens come.

    Attributes:
        tokens: the number of tokens so far; for a stopped text, up to the stop.
        stopped: whether a stop text was found; nothing follows it.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), before: Sequence[int] = ()) -> None:
        """
        Args:
            before: the prompt, for a text that continues it: many tokenizers leave out the blank of a first word.
        """
        self.tokenizer, self.stops = tokenizer, stops
        self.tokens, self.stopped = 0, False
        self._ids = list(before[-CONTEXT:])
        if self._ids and self._decode(self._ids).endswith(UNFINISHED):  # a character that the text may complete
            self._ids = []
        self._decoded = len(self._ids)  # tokens of `_ids` whose text is in `_waiting` or was returned, or before it
        self._waiting = ""  # text that may be the beginning of a stop text

    def push(self, tokens: Sequence[int]) -> str:
        """Return the text that these tokens complete, without a part that may turn out to be a stop text."""
        pieces = [[token] for token in tokens] if self.stops else [tokens]  # so that tokens are counted up to a stop
        return "".join(self._push(piece) for piece in pieces)

    def finish(self) -> str:
        """Return the rest of the text, after the last token."""
        return self._push([], final=True)

    def _push(self, tokens: Sequence[int], final: bool = False) -> str:
        if self.stopped:
            return ""
        self._ids += tokens
        self.tokens += len(tokens)
        self._waiting += self._new_text(final)
        stop_indices = [index for stop in self.stops if (index := self._waiting.find(stop)) >= 0]
        if stop_indices:
            self.stopped = True
            return self._waiting[: min(stop_indices)]
        settled = len(self._waiting) - (0 if final else self._stop_prefix_length())
        text, self._waiting = self._waiting[:settled], self._waiting[settled:]
        return text

    def _new_text(self, final: bool) -> str:
        """Return the text of the tokens since the last call, with an unfinished character only if `final`."""
        text = self._decode(self._ids)
        if text.endswith(UNFINISHED) and not final:
            return ""
        new_text = text[len(self._decode(self._ids[: self._decoded])) :]
        # The last tokens with text stay: some tokenizers decode a token otherwise at the beginning of a text.
        if new_text:
            self._ids = self._ids[self._decoded :]
        self._decoded = len(self._ids)
        return new_text

    def _stop_prefix_length(self) -> int:
        """Return how many of the last characters may begin a stop text."""
        longest = max((len(stop) - 1 for stop in self.stops), default=0)
        lengths = range(min(longest, len(self._waiting)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(self._waiting[-n:]) for stop in self.stops)), 0)

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text
