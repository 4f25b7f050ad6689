"""Error classes of the pool. Each text says what was asked, what stands in its way and what the caller does."""

from __future__ import annotations

from enum import Enum


class ErrorClass(str, Enum):
    """The nine classes of failure. Every counter, log line and metric uses these names."""

    CAPACITY = "E_CAPACITY"
    STALE = "E_STALE"
    MISS = "E_MISS"
    IO = "E_IO"
    DATA = "E_DATA"
    RANK = "E_RANK"
    STUCK = "E_STUCK"
    INVARIANT = "E_INVARIANT"
    CONFIG = "E_CONFIG"


class PoolError(Exception):
    """Base of every error of the pool. `error_class` names its class."""

    error_class: ErrorClass = ErrorClass.INVARIANT


class CapacityError(PoolError):
    """No slot now. Nothing was changed: wait for a fence, preempt, or go on without a checkpoint."""

    error_class = ErrorClass.CAPACITY


class StaleHandleError(PoolError):
    """A handle of an earlier life of its slot. Completions with one are counted and ignored, never raised."""

    error_class = ErrorClass.STALE


class StateMissError(PoolError):
    """The state is not there, or its size or header is not the expected one: recompute."""

    error_class = ErrorClass.MISS


class StateIOError(PoolError):
    """A transfer failed: the put is dropped or the load rolled back."""

    error_class = ErrorClass.IO


class StateDataError(PoolError):
    """A payload's checksum does not match: recompute, and delete the stored key."""

    error_class = ErrorClass.DATA


class RankDisagreementError(PoolError):
    """Ranks disagree on a transfer's outcome: every rank rolls back."""

    error_class = ErrorClass.RANK


class StuckLeaseError(PoolError):
    """A transfer is past its deadline and may still touch the memory: the memory is not freed."""

    error_class = ErrorClass.STUCK


class InvariantError(PoolError):
    """A rule of ownership is broken. The engine stops; `dump` holds the ledger at that moment and ends the text."""

    error_class = ErrorClass.INVARIANT

    def __init__(self, message: str, dump: str = "") -> None:
        self.dump = dump
        super().__init__(f"{message}\n{dump}" if dump else message)


class ConfigError(PoolError, ValueError):
    """A setting or argument that the pool cannot serve: what was given and what is allowed."""

    error_class = ErrorClass.CONFIG

    def __init__(self, argument: str, given: object, allowed: str) -> None:
        self.argument, self.given, self.allowed = argument, given, allowed
        super().__init__(f"{argument}: got {given}; allowed: {allowed}")


def check_int(argument: str, value: object, least: int, most: int | None = None) -> None:
    """Raises ConfigError unless `value` is an int (no bool) of at least `least` and at most `most`."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= least and (most is None or value <= most):
        return
    raise ConfigError(argument, repr(value), f"an int, at least {least}" if most is None else f"{least} .. {most}")


class PoolClosedError(PoolError):
    """The pool drains or sleeps: no new step, lookup or transfer until it wakes."""

    error_class = ErrorClass.CAPACITY
