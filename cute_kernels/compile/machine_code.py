"""Identity of the instructions in a compiled object: what a measured time depends on, whatever the sources look like."""

from __future__ import annotations

import functools
import hashlib
import struct
from pathlib import Path

MAGIC = b"\x7fELF"
CUDA = 190  # e_machine of device code
HEADER = struct.Struct("<16xHHIQQQIHHHHHH")  # ELF64, little-endian
SECTION = struct.Struct("<IIQQQQIIQQ")
NO_BITS = 8


def _device_images(data: bytes) -> list[bytes]:
    """Device ELF files inside an object file."""
    found = []
    start = data.find(MAGIC)
    while start >= 0:
        _, machine, *_ = HEADER.unpack_from(data, start)
        if machine == CUDA:
            found.append(data[start:])
        start = data.find(MAGIC, start + 1)
    return found


def _sections(image: bytes) -> list[tuple[str, bytes]]:
    """Names and contents of an ELF file's sections."""
    header = HEADER.unpack_from(image)
    offset, count, names_at = header[5], header[11], header[12]
    heads = [SECTION.unpack_from(image, offset + number * SECTION.size) for number in range(count)]
    names = heads[names_at]
    table = image[names[4] : names[4] + names[5]]
    return [
        (
            table[head[0] : table.index(b"\0", head[0])].decode(),
            b"" if head[1] == NO_BITS else image[head[4] : head[4] + head[5]],
        )
        for head in heads
    ]


@functools.cache
def code_hash(path: Path) -> str:
    """Digest of the device instructions of an object file. Raises ValueError where it holds none."""
    digest = hashlib.sha256()
    found = False
    for image in _device_images(path.read_bytes()):
        for name, content in _sections(image):
            if name.startswith(".text."):
                digest.update(content)
                found = True
    if not found:
        raise ValueError(f"{path}: no device code")
    return digest.hexdigest()[:32]
