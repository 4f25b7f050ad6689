"""The hash of an object's instructions: what runs on the device counts, and nothing else in the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from compact_state.cute_kernels.compile import cache, shared_library
from compact_state.cute_kernels.compile.machine_code import CUDA, HEADER, MAGIC, SECTION, code_hash
from compact_state.cute_kernels.configs import recurrent

HOST = 62


def elf(machine: int, sections: dict[str, bytes]) -> bytes:
    """A file of 64-bit ELF with these sections."""
    names = b"\0"
    contents, heads, offset = b"", [], HEADER.size
    for name, content in {**sections, ".shstrtab": b""}.items():
        place = len(names)
        names += name.encode() + b"\0"
        content = names if name == ".shstrtab" else content
        heads.append(SECTION.pack(place, 1, 0, 0, offset + len(contents), len(content), 0, 0, 1, 0))
        contents += content
    table = offset + len(contents)
    header = HEADER.pack(1, machine, 1, 0, 0, table, 0, 64, 0, 0, 64, len(heads), len(heads) - 1)
    return MAGIC + header[4:] + contents + b"".join(heads)


def object_file(path: Path, text: bytes, other: bytes = b"", machine: int = CUDA) -> Path:
    path.write_bytes(elf(HOST, {".text.launch": other}) + elf(machine, {".text.kernel": text, ".debug": other}))
    return path


def test_only_device_instructions_count(tmp_path: Path) -> None:
    first = code_hash(object_file(tmp_path / "a.o", b"FFMA"))
    assert code_hash(object_file(tmp_path / "b.o", b"FFMA", b"another host, another debug section")) == first
    assert code_hash(object_file(tmp_path / "c.o", b"FMUL")) != first
    with pytest.raises(ValueError, match="no device code"):
        code_hash(object_file(tmp_path / "d.o", b"FFMA", machine=HOST))


def test_a_library_says_what_its_kernels_run_only_for_its_own_sources(tmp_path: Path, monkeypatch) -> None:
    key = recurrent.heuristic("gdn", "float32", 64)
    monkeypatch.setenv(shared_library.ENVIRONMENT, str(tmp_path))
    monkeypatch.setattr(cache, "_is_whole", lambda path: False)
    digest = cache.digest_of("recurrent_decode", key)
    for known, expected in ((digest, "c0de"), ("of other sources", None)):
        index = ({key.symbol(): known}, {key.symbol(): "c0de"})
        monkeypatch.setattr(shared_library, "_open", lambda path, index=index: (None, *index))
        assert cache.machine_code("recurrent_decode", key) == expected
