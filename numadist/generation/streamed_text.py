"""The text of tokens as they come: what one decode of all of them would give, without decoding all for each.

Only the tokens since a safe place are decoded again, behind a few that were shown already: a tokenizer may drop a space
at the beginning of what it decodes, join letters of several tokens' bytes, or take back spaces before punctuation.
"""

import re
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Longest of what clean_up_tokenization_spaces shortens, all of which begin with a space: " n't".
_CLEANED = 4


class StreamedText:
    """put() and end() return what is new; together they return the text of all tokens, special ones left out."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._cleans = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self._shown: list[int] = []  # the last tokens whose text is returned
        self._shown_text = ""
        self._waiting: list[int] = []

    def put(self, token: int) -> str:
        """What can no longer change of the text, after one more token."""
        if token in self._special:
            return ""
        self._waiting.append(token)
        if self._is_byte(token):  # the bytes that follow decide whether these are letters
            return ""
        tokens = [*self._shown, *self._waiting]
        text = self._decoded(tokens)
        if text.endswith(_REPLACEMENT) or not text.startswith(self._shown_text):
            return ""
        if self._cleans and " " in self._decoded(tokens, clean_up_tokenization_spaces=False)[-_CLEANED:]:
            return ""
        new = text[len(self._shown_text) :]
        self._shown, self._waiting = self._waiting, []
        self._shown_text = self._decoded(self._shown)
        return new

    def end(self) -> str:
        """The rest."""
        text = self._decoded([*self._shown, *self._waiting])
        self._waiting = []
        return text[len(self._shown_text) :]

    def _is_byte(self, token: int) -> bool:
        return bool(_BYTE_TOKEN.fullmatch(str(self._tokenizer.convert_ids_to_tokens(token))))

    def _decoded(self, tokens: list[int], **options: bool) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, **options))
