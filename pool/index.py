"""CheckpointIndex: which cached states exist, by exact token prefix, adapter and media.

A prefix trie per adapter whose edges hold the tokens themselves, so a lookup *is* the exact verification: no hash can
collide. A hit never reaches past a difference in tokens or media, never ends inside a media span, and always leaves at
least one token to compute. Eviction order and pins are the ledger's; this file knows where entries stand.

The trie keeps the places of evicted entries for a while ("ghosts"), so that a miss can say that eviction was its cause.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .errors import CapacityError, ConfigError, check_int
from .handles import SlotHandle
from .ledger import Ledger
from .prefix import TOKEN_BYTES, PrefixKey
from .slots import Holder

MISS_REASONS = (
    "empty",
    "no_common_prefix",
    "before_first_boundary",
    "last_token",
    "limit",
    "media_span",
    "evicted",
    "capacity",
)


class IndexEntry:
    """A checkpoint: the state after `position` tokens of `key`, in the slot of `handle`."""

    __slots__ = ("epoch", "handle", "hits", "key", "kind", "node", "position", "stored")

    def __init__(self, key: PrefixKey, position: int, kind: str) -> None:
        self.key, self.position, self.kind = key, position, kind
        self.handle = SlotHandle(0, 0, 0)
        self.epoch = -1
        self.hits = 0
        self.stored = False
        self.node: _Node | None = None

    def digest(self) -> str:
        """The canonical hash of the entry's exact prefix (see `PrefixKey.digest`)."""
        return self.key.digest(self.position)


class _Node:
    __slots__ = ("children", "edge", "end", "entry", "first", "ghost", "parent")

    def __init__(self, parent: _Node | None, first: tuple[bytes, bytes], edge: bytes, end: int) -> None:
        self.parent, self.first, self.edge, self.end = parent, first, edge, end
        self.children: dict[tuple[bytes, bytes], _Node] = {}
        self.entry: IndexEntry | None = None
        self.ghost = False


@dataclass(frozen=True)
class Lookup:
    """Where a prompt can resume: `entry` and its position, or None, 0 and the reason of the miss."""

    entry: IndexEntry | None
    position: int
    reason: str


class CheckpointIndex:
    """The index of one pool. `budget_slots` bounds the checkpoints it holds (0 = cache nothing)."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        budget_slots: int | None = None,
        budget_bytes: int | None = None,
        slot_bytes: int | None = None,
        max_ghosts: int = 4096,
    ) -> None:
        if budget_bytes is not None:
            check_int("budget_bytes", budget_bytes, 0)
            if not slot_bytes or slot_bytes < 0:
                raise ConfigError("slot_bytes", slot_bytes, "the bytes of one slot, needed with budget_bytes")
            by_bytes = budget_bytes // slot_bytes
            budget_slots = by_bytes if budget_slots is None else min(budget_slots, by_bytes)
        if ledger.on_uncache is not None:
            raise ConfigError("ledger", "one with an index", "one index a ledger: the first would keep what is evicted")
        self.ledger = ledger
        self.budget_slots = ledger.num_slots if budget_slots is None else budget_slots
        check_int("budget_slots", self.budget_slots, 0)
        check_int("max_ghosts", max_ghosts, 0)
        self.max_ghosts = max_ghosts
        self.size = 0
        self.misses = dict.fromkeys(MISS_REASONS, 0)
        self.hits = 0
        self.hit_tokens = 0
        self.lookup_tokens = 0
        self.shortened = 0
        self.removed: dict[str, int] = {}
        #: Called with (entry, reason) after an entry left the index; the slot may still hold its bytes at that moment.
        self.on_remove: Callable[[IndexEntry, str], None] | None = None
        self._roots: dict[str | None, _Node] = {}
        self._ghosts: OrderedDict[int, _Node] = OrderedDict()
        ledger.on_uncache = self._uncached

    def entries(self) -> Iterator[IndexEntry]:
        """Every entry, in no particular order."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            if node.entry is not None:
                yield node.entry

    # Lookup

    def lookup(
        self, key: PrefixKey, *, limit: int | None = None, usable: Callable[[int], bool] | None = None
    ) -> Lookup:
        """The longest checkpoint that `key` may resume from, without taking it.

        At most len(key) - 1 tokens, at most `limit` (what other caches hold), and `usable(position)` true if given.
        """
        most = len(key) - 1
        allowed = most if limit is None else min(most, limit)
        root = self._roots.get(key.adapter)
        if root is None:
            return Lookup(None, 0, "empty")
        best: IndexEntry | None = None
        reason, matched, ghost = "", 0, 0
        for node, whole in self._walk(root, key):
            matched = node.end if whole else max(matched, 1)
            if not whole or not (node.entry or node.ghost):
                continue
            if node.end > most:
                reason = "last_token"
            elif key.inside_media(node.end):
                reason = "media_span"
            elif node.end > allowed or (usable is not None and not usable(node.end)):
                reason = "limit"
            elif node.entry is not None:
                best = node.entry
            else:
                ghost = node.end
        if best is not None:
            return Lookup(best, best.position, "evicted" if ghost > best.position else "")
        if not reason:
            reason = "evicted" if ghost else "before_first_boundary" if matched else "no_common_prefix"
        return Lookup(None, 0, reason)

    def hit(
        self,
        holder: Holder,
        key: PrefixKey,
        *,
        limit: int | None = None,
        usable: Callable[[int], bool] | None = None,
    ) -> int:
        """Looks `key` up and gives `holder` R on what is found. Returns the tokens that need no computing; 0 = miss."""
        found = self.lookup(key, limit=limit, usable=usable)
        self.lookup_tokens += len(key)
        reason = found.reason
        if found.entry is not None:
            try:
                self.ledger.hit(holder, found.entry.handle)
            except CapacityError:
                reason = "capacity"
            else:
                found.entry.hits += 1
                self.hits += 1
                self.hit_tokens += found.position
                self.shortened += found.reason == "evicted"
                return found.position
        self.misses[reason] += 1
        return 0

    # Insertion: reserve, then confirm or forget. Nothing is visible before confirm.

    def reserve(self, key: PrefixKey, position: int, kind: str, *, pending: int = 0) -> IndexEntry | None:
        """An entry for the state after `position` tokens, not visible yet. None if it may not or need not be cached.

        Evicts the least recently used checkpoint when the budget is full, and gives up when all are pinned. Loads in
        flight and the caller's `pending` entries, reserved and to be confirmed yet, count as well.
        """
        if not 0 < position <= len(key):
            raise ConfigError("position", position, f"1 .. {len(key)}")
        if key.inside_media(position) or self.get(key, position) is not None:
            return None
        while self.size + self.ledger.gets_in_flight + pending >= self.budget_slots:
            if not self.ledger.evict_oldest():
                return None
        return IndexEntry(key, position, kind)

    def confirm(self, entry: IndexEntry, handle: SlotHandle) -> None:
        """Makes an entry visible: its slot has C now."""
        node = self._insert(entry.key, entry.position)
        if node.entry is not None:
            raise self.ledger.broken(f"two entries at {entry.position} of one prefix")
        if node.ghost:
            node.ghost = False
            self._ghosts.pop(id(node), None)
        entry.handle, entry.epoch, entry.node = handle, self.ledger.epoch, node
        node.entry = entry
        self.size += 1

    def get(self, key: PrefixKey, position: int) -> IndexEntry | None:
        """The entry of exactly the first `position` tokens of `key`, if there is one."""
        root = self._roots.get(key.adapter)
        if root is None:
            return None
        for node, whole in self._walk(root, key):
            if whole and node.end == position:
                return node.entry
            if node.end >= position:
                return None
        return None

    def remove(self, entry: IndexEntry, reason: str = "removed") -> None:
        """Un-indexes an entry; its slot is free as soon as nobody uses it."""
        if entry.node is None:
            raise self.ledger.broken(f"entry at {entry.position} is not in the index")
        self.ledger.uncache(entry.handle, reason)

    def _uncached(self, entry: object, reason: str) -> None:
        if not isinstance(entry, IndexEntry) or entry.node is None:
            return
        node, entry.node = entry.node, None
        node.entry = None
        self.size -= 1
        self.removed[reason] = self.removed.get(reason, 0) + 1
        if reason == "evicted" and self.max_ghosts:
            node.ghost = True
            self._ghosts[id(node)] = node
            if len(self._ghosts) > self.max_ghosts:
                _, old = self._ghosts.popitem(last=False)
                old.ghost = False
                self._prune(old)
        else:
            self._prune(node)
        if self.on_remove is not None:
            self.on_remove(entry, reason)

    # The trie

    def _walk(self, root: _Node, key: PrefixKey) -> Iterator[tuple[_Node, bool]]:
        """Nodes along `key` from the root down; the last one may be matched in part only (False)."""
        node, position = root, 0
        while position < len(key):
            child = node.children.get(key.symbol(position))
            if child is None:
                return
            whole = (
                child.end <= len(key)
                and key.next_media(position) >= child.end
                and key.tokens.startswith(child.edge, position * TOKEN_BYTES)
            )
            yield child, whole
            if not whole:
                return
            node, position = child, child.end

    def _insert(self, key: PrefixKey, position: int) -> _Node:
        node = self._roots.get(key.adapter)
        if node is None:
            node = self._roots[key.adapter] = _Node(None, (b"", b""), b"", 0)
        at = 0
        while at < position:
            stop = min(position, key.next_media(at))
            first = key.symbol(at)
            child = node.children.get(first)
            if child is None:
                child = _Node(node, first, key.slice(at, stop), stop)
                node.children[first] = child
            else:
                common = at + _common_tokens(child.edge, key.slice(at, min(stop, child.end)))
                if common < child.end:
                    child = self._split(child, at, common)
            node, at = child, child.end
        return node

    def _split(self, child: _Node, start: int, at: int) -> _Node:
        parent, cut = child.parent, (at - start) * TOKEN_BYTES
        upper = _Node(parent, child.first, child.edge[:cut], at)
        if parent is not None:
            parent.children[child.first] = upper
        child.parent, child.edge = upper, child.edge[cut:]
        # A node starts at every media item, so only plain tokens are cut here.
        child.first = (child.edge[:TOKEN_BYTES], b"")
        upper.children[child.first] = child
        return upper

    def _prune(self, node: _Node) -> None:
        """Removes a node that leads nowhere, and joins what its removal leaves with one child."""
        while node.entry is None and not node.ghost and not node.children:
            parent = node.parent
            if parent is None:
                self._roots = {name: root for name, root in self._roots.items() if root is not node}
                return
            del parent.children[node.first]
            node = parent
        if node.entry is None and not node.ghost and node.parent is not None and len(node.children) == 1:
            (child,) = node.children.values()
            if not child.first[1]:
                child.edge = node.edge + child.edge
                child.first, child.parent = node.first, node.parent
                node.parent.children[node.first] = child


def _common_tokens(a: bytes, b: bytes) -> int:
    """Tokens that two edges have in common from their start."""
    low, high = 0, min(len(a), len(b)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if a.startswith(b[: middle * TOKEN_BYTES]):
            low = middle
        else:
            high = middle - 1
    return low
