"""Every environment variable that the adapter reads, with its rule. Standard library only: the start-up hook uses it."""

from __future__ import annotations

import os

ENABLE = "LMDEPLOY_ENABLE_COMPACT_STATE"
SAVE_ALIGNMENT = "LMDEPLOY_COMPACT_PREFILL_SAVE_ALIGNMENT"
BACKEND = "LMDEPLOY_COMPACT_BACKEND"
FUSED_DECODE = "LMDEPLOY_COMPACT_FUSED_DECODE"
SHORT_STEPS = "LMDEPLOY_COMPACT_SHORT_STEPS"

BACKENDS = ("auto", "kernels", "reference")
DEFAULT_SAVE_ALIGNMENT = 512

# lmdeploy's own words for a boolean (lmdeploy.pytorch.envs.env_to_bool).
_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")
# Variables of this library that a worker process must see as its driver does.
_FORWARDED_PREFIXES = ("LMDEPLOY_COMPACT_", "COMPACT_STATE_")


def _boolean(name: str, default: bool) -> bool:
    value = os.environ.get(name)
    if value is None:
        return default
    word = value.lower().strip()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError(
        f"Cannot convert environment variable '{name}={value}' to boolean. "
        f"Allowed true values: {', '.join(_TRUE)}; false values: {', '.join(_FALSE)}."
    )


def enabled() -> bool:
    """Whether LMDEPLOY_ENABLE_COMPACT_STATE asks for the compact state pool; unset means no.

    Raises ValueError, in lmdeploy's own terms, for a word that is neither true nor false.
    """
    return _boolean(ENABLE, False)


def fused_decode() -> bool:
    """Whether a decode step runs a whole linear layer in one launch (LMDEPLOY_COMPACT_FUSED_DECODE, default yes).

    0 runs conv, rule and norm one by one: for comparing the two. Raises ValueError for a word that is no boolean.
    """
    return _boolean(FUSED_DECODE, True)


def short_steps() -> bool:
    """Whether the host's work of a decode step is cut short (LMDEPLOY_COMPACT_SHORT_STEPS, default yes).

    0 leaves every step as lmdeploy makes it: for comparing the two. Raises ValueError for a word that is no boolean.
    """
    return _boolean(SHORT_STEPS, True)


def prefill_save_alignment() -> int:
    """Token distance of the checkpoints written inside one prefill forward (LMDEPLOY_COMPACT_PREFILL_SAVE_ALIGNMENT).

    Default 512; 0 writes none inside a forward, only the one at its end. Raises ValueError for anything else that is
    not a non-negative integer; that it is a multiple of the KV block size is checked where the block size is known.
    """
    value = os.environ.get(SAVE_ALIGNMENT)
    if value is None:
        return DEFAULT_SAVE_ALIGNMENT
    if not value.strip().isdecimal():
        raise ValueError(
            f"{SAVE_ALIGNMENT}={value}: not a non-negative number of tokens; set a multiple of block_size."
        )
    return int(value)


def backend() -> str:
    """Which operators run (LMDEPLOY_COMPACT_BACKEND): auto, kernels or reference. Raises ValueError for another word."""
    value = os.environ.get(BACKEND, "auto").lower().strip()
    if value not in BACKENDS:
        raise ValueError(f"{BACKEND}={value}: allowed: {', '.join(BACKENDS)}.")
    return value


def forwarded() -> dict[str, str]:
    """The variables, as set here, that every worker process of this engine needs."""
    return {name: value for name, value in os.environ.items() if name == ENABLE or name.startswith(_FORWARDED_PREFIXES)}
