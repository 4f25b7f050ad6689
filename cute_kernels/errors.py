"""Named errors of the operators. Each text says the argument, what was given and what is allowed."""

from __future__ import annotations


class CompactStateError(Exception):
    """Base of every error this package raises on purpose."""


class InvalidArgumentError(CompactStateError, ValueError):
    """An argument's dtype, shape, stride, device or value is not one the operator takes."""

    def __init__(self, argument: str, given: object, allowed: str) -> None:
        self.argument, self.given, self.allowed = argument, given, allowed
        super().__init__(f"{argument}: got {given}; allowed: {allowed}")


class UnsupportedConfigError(CompactStateError, NotImplementedError):
    """The arguments are consistent, but no kernel serves this combination."""


class BackendUnavailableError(CompactStateError, RuntimeError):
    """Kernels were asked for where they cannot run: no sm_90 device, no compiler and no built cache, wrong version."""


class CompileCacheError(CompactStateError, OSError):
    """The compile cache folder cannot be used safely: unreadable, or writable by others."""


class CompileError(CompactStateError, RuntimeError):
    """A specialisation did not compile, or broke its resource budget."""
