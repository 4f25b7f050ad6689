"""Sizes, roles and shared-memory addresses common to the chunkwise prefill kernels.

A tile is 64 tokens by 64 16-bit columns (8 KiB): token rows of 128 bytes whose 16-byte pieces are permuted by the 128-byte
swizzle, piece p of row r at piece p ^ (r & 7). TMA writes that image, wgmma reads it, and hand-written stores address it with
`tile_address`. An operand of 128 columns is two tiles, one behind the other.
"""

import enum

CHUNK = 64
HEAD = 128
TILE_BYTES = CHUNK * 64 * 2
OPERAND_BYTES = 2 * TILE_BYTES
STATE_ELEMENTS = HEAD * HEAD
OUT_PITCH = 272  # bytes of an output row in shared memory: 16 bytes of padding spread the rows over the banks
INPUT_STAGES = 3  # GDN: K, Q, V and vectors
WORK_STAGES = 2  # GDN: T' and P
LOWER_PITCH = 144  # bytes of a row of the triangular work matrix, padded for the same reason


class Barrier(enum.IntEnum):
    """Named barriers; 0 is `sync_threads`."""

    PAIRS = (
        1  # three for each pairs warpgroup: norms written, diagonal blocks inverted, rows beyond a short chunk zeroed
    )


class Flag(enum.IntFlag):
    """Bits of a chunk's flags."""

    FIRST = 1  # of its sequence and head: load the state
    LAST = 2  # store the state
    STOP = 4  # no chunk: the block's work is done
    WORKSPACE = 8  # the state to load is in the workspace, not in the pool
    IDENTITY = 16  # the state starts as the identity and the values are zero: the segment's transition
    KEEP_START = 32  # copy the loaded state to the workspace
    HANDS_ON = 64  # the state is stored to the workspace, not to the pool


class Field(enum.IntEnum):
    """Words of a chunk record, written by the producer beside the K stage and guarded by its barriers."""

    TOKEN = 0  # first token in the packed rows
    COUNT = 1  # valid tokens, 0..64
    FLAGS = 2
    HEAD = 3  # value head
    READ = 4  # slot to load, when FIRST
    WRITE = 5  # slot to store, when LAST
    CHECKPOINT = 6  # slot that keeps the state at the end of this chunk, or -1
    SEQUENCE = 7


RECORD_WORDS = 8


def tile_address(base, row, piece):
    """Byte address of 16-byte piece `piece` (0..7) of token row `row` in a swizzled tile."""
    return base + row * 128 + ((piece ^ (row & 7)) << 4)
