"""PrefixKey: what identifies a prefix, and its canonical hash.

Tokens are kept as little-endian int32 bytes: comparing and hashing them is one pass of C code, and the bytes are the
same in every process.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from sys import byteorder

from .errors import ConfigError

TOKEN_BYTES = 4
DIGEST_SCHEMA = b"compact-state prefix 1"
_NO_MEDIA = b""


class PrefixKey:
    """A prompt's identity: tokens, adapter and media.

    `adapter`: any canonical name of the adapter *and its weights*; None (no adapter) differs from "". `media`: spans
    (start, end, content hash) of non-overlapping media items, whose tokens are mere placeholders.
    """

    __slots__ = ("_by_start", "_ends", "_starts", "adapter", "media", "tokens")

    def __init__(
        self,
        tokens: Sequence[int] | bytes,
        *,
        adapter: str | None = None,
        media: Iterable[tuple[int, int, bytes]] = (),
    ) -> None:
        self.tokens = bytes(tokens) if isinstance(tokens, (bytes, bytearray)) else encode_tokens(tokens)
        if len(self.tokens) % TOKEN_BYTES:
            raise ConfigError("tokens", f"{len(self.tokens)} bytes", f"a multiple of {TOKEN_BYTES}")
        if adapter is not None and not isinstance(adapter, str):
            raise ConfigError("adapter", repr(adapter), "a name, or None")
        self.adapter = adapter
        self.media = tuple(sorted(media))
        last = 0
        for span in self.media:
            hashed = len(span) == 3 and isinstance(span[2], bytes) and span[2]
            if not hashed or not last <= span[0] < span[1] <= len(self):
                raise ConfigError(
                    "media", span, f"hashed spans in order within {len(self)} tokens: (start, end, bytes)"
                )
            last = span[1]
        self._starts = [start for start, _, _ in self.media]
        self._ends = [end for _, end, _ in self.media]
        self._by_start = {start: end.to_bytes(8, "little") + digest for start, end, digest in self.media}

    def __len__(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    def extended(self, tokens: Sequence[int]) -> PrefixKey:
        """This key with generated tokens appended."""
        return PrefixKey(self.tokens + encode_tokens(tokens), adapter=self.adapter, media=self.media)

    def slice(self, start: int, stop: int) -> bytes:
        """Tokens start .. stop - 1 as bytes."""
        return self.tokens[start * TOKEN_BYTES : stop * TOKEN_BYTES]

    def symbol(self, position: int) -> tuple[bytes, bytes]:
        """The token at `position`, with the media item that starts there."""
        token = self.tokens[position * TOKEN_BYTES : (position + 1) * TOKEN_BYTES]
        return token, self._by_start.get(position, _NO_MEDIA)

    def next_media(self, position: int) -> int:
        """Start of the first media item after `position`; a number past every prompt if there is none."""
        index = bisect_left(self._starts, position + 1)
        return self._starts[index] if index < len(self._starts) else 1 << 62

    def inside_media(self, position: int) -> bool:
        """Whether the first `position` tokens end inside a media item."""
        index = bisect_left(self._starts, position) - 1
        return index >= 0 and position < self._ends[index]

    def digest(self, position: int | None = None) -> str:
        """32 hex digits of BLAKE2b over the canonical bytes of the first `position` tokens (default all).

        Every field is length-prefixed and tagged, so no two identities share their bytes; the value is the same in
        every process. Raises ConfigError for a position outside 0 .. len.
        """
        position = len(self) if position is None else position
        if not 0 <= position <= len(self):
            raise ConfigError("position", position, f"0 .. {len(self)}")
        state = hashlib.blake2b(DIGEST_SCHEMA, digest_size=16)
        adapter = b"n" if self.adapter is None else b"a" + self.adapter.encode()
        for field in (adapter, self.slice(0, position)):
            state.update(len(field).to_bytes(8, "little"))
            state.update(field)
        for start, end, content in self.media:
            if start < position:
                state.update(start.to_bytes(8, "little") + end.to_bytes(8, "little"))
                state.update(len(content).to_bytes(8, "little") + content)
        return state.hexdigest()


def encode_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian int32 bytes. Raises ConfigError for an id that is no int32."""
    try:
        encoded = array("i", tokens)
    except (OverflowError, TypeError) as error:
        raise ConfigError("tokens", str(error), "token ids that fit int32") from None
    if byteorder == "big":
        encoded.byteswap()
    return encoded.tobytes()
