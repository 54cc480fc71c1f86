# SPDX-License-Identifier: Apache-2.0
"""A tokenizer that needs no file and no download."""

from __future__ import annotations

from nemo.collections.common.tokenizers.tokenizer_spec import TokenizerSpec

_SPECIALS = 3  # eod, bos, eos come before the 256 bytes


class ByteTokenizer(TokenizerSpec):
    """One id per UTF-8 byte, padded with unused ids to `vocab_size`.

    The padding gives the embedding the size that the model has with its real tokenizer, so that
    memory and checkpoint sizes are true even though the data is made up.
    """

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < _SPECIALS + 256:
            raise ValueError(f"a byte tokenizer needs {_SPECIALS + 256} ids, found {vocab_size}")
        self._vocab_size = vocab_size

    vocab_size = property(lambda self: self._vocab_size)
    eod = property(lambda self: 0)
    bos_id = property(lambda self: 1)
    eos_id = property(lambda self: 2)
    pad_id = property(lambda self: 0)

    @property
    def unique_identifiers(self) -> dict[str, object]:
        return {"class": type(self).__qualname__, "vocab_size": self._vocab_size}

    def text_to_ids(self, text: str) -> list[int]:
        return [byte + _SPECIALS for byte in text.encode()]

    def ids_to_text(self, ids: list[int]) -> str:
        data = bytes(i - _SPECIALS for i in ids if _SPECIALS <= i < _SPECIALS + 256)
        return data.decode(errors="replace")

    def text_to_tokens(self, text: str) -> list[str]:
        return [chr(byte) for byte in text.encode()]

    def tokens_to_text(self, tokens: list[str]) -> str:
        return bytes(ord(token) for token in tokens).decode(errors="replace")

    def tokens_to_ids(self, tokens: list[str]) -> list[int]:
        return [ord(token) + _SPECIALS for token in tokens]

    def ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [chr(i - _SPECIALS) for i in ids]
