"""What the store connector tells the outside: log lines that a dead store cannot flood, and Prometheus metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .errors import ConfigError, ErrorClass
from .store_types import StoreCounters

if TYPE_CHECKING:
    from .store import MooncakeStateStore

#: Classes that somebody has to look at: bytes were wrong, or a slot is lost until the pool is rebuilt.
ALARMS = (ErrorClass.DATA, ErrorClass.STUCK, ErrorClass.RANK)
INTERVAL_S = 1.0


class StoreLog:
    """Counts every failure by class and logs them: alarms always, the rest at most once a second and class."""

    def __init__(self, logger: logging.Logger, counters: StoreCounters, clock: Callable[[], float]) -> None:
        self._logger, self._counters, self._clock = logger, counters, clock
        self._next: dict[ErrorClass, float] = {}
        self._dropped: dict[ErrorClass, int] = {}

    def failure(self, what: str, error: ErrorClass, reason: str) -> None:
        """One failure that was handled."""
        self._counters.errors[error.value] += 1
        now = self._clock()
        if error in ALARMS:
            self._logger.error("%s: %s: %s", error.value, what, reason)
        elif now >= self._next.get(error, now):
            dropped = self._dropped.pop(error, 0)
            more = f" ({dropped} more of this class since the last line)" if dropped else ""
            self._logger.warning("%s: %s: %s%s", error.value, what, reason, more)
            self._next[error] = now + INTERVAL_S
        else:
            self._dropped[error] = self._dropped.get(error, 0) + 1


def register_store_metrics(
    store: MooncakeStateStore, *, registry: Any = None, prefix: str = "compact_state_store"
) -> Any:
    """A Prometheus collector that reads the connector when it is scraped. ConfigError without prometheus-client."""
    try:
        from prometheus_client import REGISTRY
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    except ImportError:
        raise ConfigError("prometheus_client", "not installed", "pip install prometheus-client") from None

    class StoreCollector:
        def collect(self) -> Iterator[Any]:
            events = CounterMetricFamily(f"{prefix}_events", "Events of the store connector", labels=["event"])
            errors = CounterMetricFamily(f"{prefix}_errors", "Failures handled, by class", labels=["class"])
            for name, value in asdict(store.counters).items():
                if name != "errors":
                    events.add_metric([name], value)
            for name, value in store.counters.errors.items():
                errors.add_metric([name], value)
            yield events
            yield errors
            yield GaugeMetricFamily(
                f"{prefix}_breaker_open", "1 while the store is not asked", value=store.breaker.open
            )

    collector = StoreCollector()
    (REGISTRY if registry is None else registry).register(collector)
    return collector
