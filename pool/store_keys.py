"""Store keys and payload headers: what a stored state is a state *of*.

A key hashes everything that fixes the bytes and what they mean, with a readable prefix before the hash; equal keys mean
equal bytes, so keys are written once. The header in front of each payload repeats the key's digest, so that bytes which
arrive under a wrong key, cut short or changed are noticed by the reader.
"""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from .errors import ConfigError, ErrorClass
from .prefix import PrefixKey

KEY_SCHEMA = 1
HEADER_BYTES = 64
MAGIC = b"CMPSTATE"
#: magic, schema, header bytes, key digest, step, payload bytes, xxh3 of the payload, put id; then crc32 of all before.
_FIELDS = struct.Struct("<8sHH16sQQQQ")
_CRC = struct.Struct("<I")
_READABLE = 40


@dataclass(frozen=True)
class StoreIdentity:
    """What all keys of a running model share.

    Attributes:
        model: name of the model.
        weights: immutable identity of the weights, e.g. a revision hash: never a local counter. Empty is refused.
        draft: identity of the draft model and its weights, "" without one.
        tenant: who may share states.
        variant: anything else that changes states, e.g. how the KV cache or the weights are quantised.
    """

    model: str
    weights: str
    draft: str = ""
    tenant: str = ""
    variant: str = ""

    def __post_init__(self) -> None:
        for item in fields(self):
            if not isinstance(getattr(self, item.name), str):
                raise ConfigError(item.name, repr(getattr(self, item.name)), "a string")
        for name in ("model", "weights"):
            if not getattr(self, name):
                raise ConfigError(name, "''", "an identity that never names other weights; without one, no store")


class StateName(NamedTuple):
    """One state on all ranks: the part of its keys that ranks share."""

    text: str
    position: int


class StateKeys:
    """Builds keys. `layouts[r]` is the layout digest of rank r, and their number the tensor-parallel size."""

    def __init__(self, identity: StoreIdentity, layouts: Sequence[str]) -> None:
        if not layouts:
            raise ConfigError("layouts", "none", "one layout digest per rank")
        self.identity, self.layouts = identity, tuple(layouts)
        state = hashlib.blake2b(b"compact-state store", digest_size=16)
        parts = [str(KEY_SCHEMA), *(getattr(identity, field.name) for field in fields(identity)), *self.layouts]
        for part in parts:
            encoded = part.encode()
            state.update(len(encoded).to_bytes(8, "little") + encoded)
        self._seed = state.digest()
        self._readable = re.sub(r"[^A-Za-z0-9._]+", "-", identity.model)[:_READABLE]

    @property
    def ranks(self) -> int:
        return len(self.layouts)

    def names(self, key: PrefixKey, positions: Sequence[int]) -> list[StateName]:
        """The states after exactly the given numbers of tokens of `key` (its adapter and media included), in that order.

        One pass over the tokens whatever the number of positions. ConfigError for a position outside 1 .. len(key).
        """
        adapter = b"n" if key.adapter is None else b"a" + key.adapter.encode()
        state = hashlib.blake2b(self._seed + len(adapter).to_bytes(8, "little") + adapter, digest_size=16)
        texts, at = {}, 0
        for position in sorted(set(positions)):
            if not 0 < position <= len(key):
                raise ConfigError("positions", position, f"1 .. {len(key)}")
            state.update(key.slice(at, position))
            at = position
            end = state.copy()
            for start, stop, content in key.media:
                if start < position:
                    for number in (start, stop, len(content)):
                        end.update(number.to_bytes(8, "little"))
                    end.update(content)
            # Last and of fixed width: with it the bytes before can be taken apart in one way only.
            end.update(position.to_bytes(8, "little"))
            texts[position] = f"cs{KEY_SCHEMA}:{self._readable}:{position}:{end.hexdigest()}"
        return [StateName(texts[position], position) for position in positions]

    def of_rank(self, name: StateName, rank: int) -> str:
        """The store key of one rank's part: it says rank and number of ranks."""
        return f"{name.text}:r{rank}of{self.ranks}"


@dataclass(frozen=True)
class Header:
    """The 64 bytes in front of a payload."""

    key: str
    step: int
    payload_bytes: int
    checksum: int
    put_id: int

    def pack(self) -> bytes:
        """Exactly HEADER_BYTES bytes."""
        body = _FIELDS.pack(
            MAGIC,
            KEY_SCHEMA,
            HEADER_BYTES,
            key_digest(self.key),
            self.step,
            self.payload_bytes,
            self.checksum,
            self.put_id,
        )
        return body + _CRC.pack(zlib.crc32(body))

    @classmethod
    def check(cls, raw: bytes, *, key: str, step: int, payload_bytes: int) -> Header | HeaderFault:
        """The header of a payload read under `key`, or what is wrong with it."""
        body = raw[: _FIELDS.size]
        magic, schema, size, digest, stored_step, stored_bytes, checksum, put_id = _FIELDS.unpack(body)
        if magic != MAGIC or schema != KEY_SCHEMA or size != HEADER_BYTES:
            return HeaderFault(ErrorClass.MISS, f"magic {magic!r}, schema {schema}, header of {size} bytes")
        if _CRC.unpack(raw[_FIELDS.size : HEADER_BYTES])[0] != zlib.crc32(body):
            return HeaderFault(ErrorClass.DATA, "the header's own checksum does not match")
        if digest != key_digest(key):
            return HeaderFault(ErrorClass.MISS, "the payload was stored under another key")
        if (stored_step, stored_bytes) != (step, payload_bytes):
            return HeaderFault(
                ErrorClass.MISS, f"step {stored_step}, {stored_bytes} bytes; expected {step}, {payload_bytes}"
            )
        return cls(key, step, payload_bytes, checksum, put_id)


class HeaderFault(NamedTuple):
    """Why a header was refused."""

    error: ErrorClass
    reason: str


def key_digest(key: str) -> bytes:
    """The 16 bytes that stand for a key in a header."""
    return hashlib.blake2b(key.encode(), digest_size=16).digest()


assert _FIELDS.size + _CRC.size == HEADER_BYTES
