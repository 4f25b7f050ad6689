"""CheckpointIndex against a plain dictionary, and the cases of prefix reuse."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from compact_state.pool import CapacityError, CheckpointIndex, ConfigError, Ledger, Lifecycle, PrefixKey, StepRow
from compact_state.pool.index import IndexEntry
from compact_state.pool.invariants import check

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
SPANS = st.sampled_from([(), ((1, 3, b"x"),), ((1, 3, b"y"),), ((2, 6, b"x"),), ((0, 2, b"x"), (4, 5, b"y"))])


def make_key(tokens: list[int], adapter: str | None, spans: tuple[tuple[int, int, bytes], ...]) -> PrefixKey:
    return PrefixKey(tokens, adapter=adapter, media=[span for span in spans if span[1] <= len(tokens)])


def identity(key: PrefixKey, position: int) -> tuple[object, ...]:
    return (key.adapter, key.slice(0, position), tuple(span for span in key.media if span[0] < position))


def store(ledger: Ledger, index: CheckpointIndex, key: PrefixKey, position: int) -> IndexEntry | None:
    """A checkpoint as a finished request leaves it."""
    holder = ledger.admit(object())
    step = ledger.begin_step()
    ledger.submit(step, [holder], [position])
    entry = index.reserve(key, position, "final")
    if entry is None:
        ledger.drop(holder)
    else:
        handle = ledger.publish_final(holder, position, entry)
        assert handle is not None
        index.confirm(entry, handle)
    ledger.step_launched(step)
    ledger.step_done(step)
    return entry


class IndexMachine(RuleBasedStateMachine):
    """The trie does what a dictionary of exact identities does, least recently used first out."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(12)
        self.index = CheckpointIndex(self.ledger, budget_slots=5, max_ghosts=3)
        self.model: dict[tuple[object, ...], IndexEntry] = {}
        self.index.on_remove = self.removed
        self.gone: list[IndexEntry] = []

    def removed(self, entry: IndexEntry, reason: str) -> None:
        self.gone.append(entry)
        del self.model[identity(entry.key, entry.position)]

    @rule(tokens=TOKENS, adapter=st.sampled_from([None, ""]), spans=SPANS, data=st.data())
    def insert(
        self, tokens: list[int], adapter: str | None, spans: tuple[tuple[int, int, bytes], ...], data: st.DataObject
    ) -> None:
        key = make_key(tokens, adapter, spans)
        position = data.draw(st.integers(1, len(tokens)))
        oldest = next(iter(self.ledger.evictable.values())).entry if self.index.size == 5 else None
        entry = store(self.ledger, self.index, key, position)
        known = identity(key, position) in self.model
        inside = any(start < position < end for start, end, _ in key.media)
        assert (entry is None) == (known or inside)
        if entry is not None:
            assert oldest is None or self.gone[-1] is oldest
            self.model[identity(key, position)] = entry

    @rule(
        tokens=TOKENS,
        adapter=st.sampled_from([None, ""]),
        spans=SPANS,
        limit=st.one_of(st.none(), st.integers(0, 9)),
        multiple=st.sampled_from([1, 2, 3]),
        take=st.booleans(),
    )
    def look(
        self,
        tokens: list[int],
        adapter: str | None,
        spans: tuple[tuple[int, int, bytes], ...],
        limit: int | None,
        multiple: int,
        take: bool,
    ) -> None:
        key = make_key(tokens, adapter, spans)
        most = len(tokens) - 1 if limit is None else min(limit, len(tokens) - 1)
        expected = [
            position
            for position in range(1, most + 1)
            if identity(key, position) in self.model
            and position % multiple == 0
            and not any(start < position < end for start, end, _ in key.media)
        ]
        found = self.index.lookup(key, limit=limit, usable=lambda position: position % multiple == 0)
        assert found.position == max(expected, default=0)
        assert found.entry is (self.model[identity(key, max(expected))] if expected else None)
        assert expected or found.reason in self.index.misses
        if take and expected:
            holder = self.ledger.admit(object())
            self.index.hit(holder, key, limit=limit, usable=lambda position: position % multiple == 0)
            assert found.entry is not None
            assert self.ledger.records[found.entry.handle.slot].readers == 1
            self.ledger.drop(holder)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.model:
            self.index.remove(data.draw(st.sampled_from(list(self.model.values()))))

    @rule()
    def new_weights(self) -> None:
        self.ledger.bump_epoch()
        assert not self.model

    @invariant()
    def same_entries(self) -> None:
        entries = {identity(entry.key, entry.position): entry for entry in self.index.entries()}
        assert entries == self.model
        assert self.index.size == len(self.model)
        check(self.ledger, self.index)

    @invariant()
    def trie_is_small(self) -> None:
        """Nodes only where an entry, a ghost, a branch or a media item is: forgotten prefixes cost nothing."""
        stack = list(self.index._roots.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            if node.parent is not None:
                assert node.entry or node.ghost or node.children


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestIndex = IndexMachine.TestCase


def test_of_evicted_prefixes_no_more_than_max_ghosts_are_remembered() -> None:
    ledger = Ledger(6)
    index = CheckpointIndex(ledger, budget_slots=1, max_ghosts=2)
    keys = [PrefixKey([first, *range(50, 58)]) for first in range(5)]
    for key in keys:
        store(ledger, index, key, 4)
    reasons = [index.lookup(key).reason for key in keys]
    assert reasons == ["no_common_prefix", "no_common_prefix", "evicted", "evicted", ""]


def test_a_hit_leaves_a_token_to_compute() -> None:
    ledger = Ledger(4)
    index = CheckpointIndex(ledger)
    key = PrefixKey(range(8))
    store(ledger, index, key, 8)
    found = index.lookup(key)
    assert (found.position, found.reason) == (0, "last_token")
    assert index.lookup(key.extended([9])).position == 8


def test_reasons_of_a_miss() -> None:
    ledger = Ledger(6)
    index = CheckpointIndex(ledger, budget_slots=2)
    long = PrefixKey([1, 2, 3, 4, 5, 6, 7])
    assert index.lookup(long).reason == "empty"
    store(ledger, index, long, 4)
    assert index.lookup(PrefixKey([9, 9])).reason == "no_common_prefix"
    assert index.lookup(PrefixKey([1, 2, 3, 9, 9])).reason == "before_first_boundary"
    assert index.lookup(long, limit=3).reason == "limit"
    assert index.lookup(PrefixKey([1, 2, 3, 4])).reason == "last_token"
    assert index.lookup(PrefixKey([1], adapter="a")).reason == "empty"
    store(ledger, index, PrefixKey([5, 5]), 2)
    store(ledger, index, PrefixKey([6, 6]), 2)
    assert index.lookup(long).reason == "evicted"
    assert index.removed == {"evicted": 1}
    spanned = PrefixKey([1, 2, 3, 4, 5], media=[(2, 5, b"cat")])
    assert index.lookup(spanned).reason == "before_first_boundary"
    holder = ledger.admit("a")
    assert index.hit(holder, long) == 0
    assert index.misses["evicted"] == 1


def test_a_pinned_checkpoint_is_never_evicted_and_a_full_cache_skips() -> None:
    ledger = Ledger(6)
    index = CheckpointIndex(ledger, budget_slots=1)
    key = PrefixKey(range(8))
    entry = store(ledger, index, key, 4)
    holder = ledger.admit("reader")
    assert index.hit(holder, key) == 4
    assert store(ledger, index, PrefixKey([7] * 8), 4) is None
    assert list(index.entries()) == [entry]
    ledger.drop(holder)
    assert store(ledger, index, PrefixKey([7] * 8), 4) is not None
    assert entry is not None
    assert entry not in list(index.entries())


def test_a_hit_that_would_starve_admitted_requests_is_a_miss() -> None:
    ledger = Ledger(2)
    index = CheckpointIndex(ledger)
    key = PrefixKey(range(8))
    store(ledger, index, key, 4)
    first = ledger.admit("first")
    second = ledger.admit("second")
    with pytest.raises(CapacityError):
        ledger.admit("third")
    assert index.hit(second, key) == 0
    assert index.misses["capacity"] == 1
    assert first.rec is None


def test_budget_in_bytes() -> None:
    assert CheckpointIndex(Ledger(10), budget_bytes=1050, slot_bytes=256).budget_slots == 4
    assert CheckpointIndex(Ledger(10), budget_bytes=1050, slot_bytes=256, budget_slots=3).budget_slots == 3
    with pytest.raises(ConfigError, match="position"):
        CheckpointIndex(Ledger(10)).reserve(PrefixKey([1]), 2, "final")


def test_H10_media_never_mixed_and_never_cut() -> None:
    ledger = Ledger(8)
    index = CheckpointIndex(ledger)
    tokens = list(range(40))
    cat = PrefixKey(tokens, media=[(10, 26, b"cat")])
    dog = PrefixKey(tokens, media=[(10, 26, b"dog")])
    for position in (8, 10, 26, 32):
        assert store(ledger, index, cat, position) is not None
    assert store(ledger, index, cat, 20) is None
    assert index.lookup(cat).position == 32
    assert index.lookup(dog).position == 10
    assert index.lookup(PrefixKey(tokens)).position == 10
    assert store(ledger, index, PrefixKey(tokens), 20) is not None
    assert index.lookup(dog).position == 10
    longer = PrefixKey([*tokens], media=[(10, 30, b"cat")])
    assert index.lookup(longer).position == 10


@pytest.mark.parametrize(("saved", "resumed"), [((512,), 512), ((), 0), ((512, 1536), 512)])
def test_H7_resume_is_the_state_checkpoint_within_what_the_kv_cache_has(saved: tuple[int, ...], resumed: int) -> None:
    life = Lifecycle(ledger := Ledger(8), CheckpointIndex(ledger))
    key = PrefixKey(range(2000))
    for position in saved:
        store(ledger, life.index, key, position)
    request = life.add("a", key)
    assert life.admit(request, limit=1024)
    assert request.resumed == request.position == resumed
    plan = life.plan([StepRow(request, 8)])
    assert (plan.read_ids[0] >= 0) == (resumed > 0)


def test_H11_shared_prefix_is_reused_and_states_per_prompt_are_bounded() -> None:
    life = Lifecycle(ledger := Ledger(12), CheckpointIndex(ledger, budget_slots=8))
    shared = list(range(3000))
    for name, tail in (("a", 1), ("b", 2)):
        request = life.add(name, PrefixKey([*shared, *([tail] * 500)]))
        assert life.admit(request)
        assert request.resumed == (0 if name == "a" else 2560)
        while request.position < 3500:
            step = min(1024, 3500 - request.position)
            plan = life.plan([StepRow(request, step, positions=range(512, 3501, 512))])
            life.launched(plan.step)
            life.poll()
            assert len(plan.entries) <= 2
        life.finish(request, publish=False)
    assert life.index.size == 7


def test_H3_a_boundary_that_moves_still_hits_and_misses_are_explained() -> None:
    life = Lifecycle(ledger := Ledger(40), CheckpointIndex(ledger, budget_slots=30))
    for workload, common in ((0, 1100), (1, 1500)):
        before = life.index.hit_tokens
        for number in range(8):
            key = PrefixKey([workload] * common + [100 + number] * 300)
            request = life.add((workload, number), key)
            assert life.admit(request)
            while request.position < len(key):
                step = min(512, len(key) - request.position)
                plan = life.plan([StepRow(request, step, positions=range(256, 2000, 256))])
                life.launched(plan.step)
                life.poll()
            life.finish(request, publish=False)
        assert life.index.hit_tokens - before == 7 * (common // 256 * 256)
    assert life.index.misses["empty"] == 1
    assert life.index.misses["no_common_prefix"] == 1


def test_G15_a_fork_of_a_long_prompt_finds_its_boundary() -> None:
    life = Lifecycle(ledger := Ledger(48), CheckpointIndex(ledger))
    for number in range(3):
        request = life.add(number, PrefixKey([number] * 32768))
        assert life.admit(request)
        while request.position < 32768:
            plan = life.plan([StepRow(request, 2048, positions=range(2048, 32769, 2048))])
            life.launched(plan.step)
            life.poll()
        life.finish(request)
    fork = life.add("fork", PrefixKey([0] * 8192 + [9] * 100))
    assert life.admit(fork)
    print(f"G15 hit tokens: {life.index.hit_tokens}")
    assert fork.resumed == life.index.hit_tokens == 8192


def test_H5_boundary_of_a_resume_point() -> None:
    """The checkpoint that a resume point falls on is found by its token count: no table of columns is indexed."""
    for interval, resume, boundary in ((2176, 100_096, 46), (1152, 11_520, 10)):
        ledger = Ledger(128)
        index = CheckpointIndex(ledger)
        key = PrefixKey(range(resume + 1))
        for number in range(1, resume // interval + 1):
            store(ledger, index, key, number * interval)
        found = index.lookup(key)
        assert found.position == boundary * interval == resume // interval * interval
        assert found.entry is index.get(key, boundary * interval)
        assert index.get(key, resume + 5) is None


def test_a_hook_that_raises_leaks_no_slot() -> None:
    life = Lifecycle(ledger := Ledger(2), CheckpointIndex(ledger))
    request = life.add("a", PrefixKey(range(9)))
    assert life.admit(request)
    life.launched(life.plan([StepRow(request, 4)]).step)
    life.poll()
    assert life.finish(request) is not None

    def raises(entry: IndexEntry, reason: str) -> None:
        raise RuntimeError(reason)

    life.index.on_remove = raises
    with pytest.raises(RuntimeError, match="evicted"):
        ledger.evict_oldest()
    check(ledger, life.index)
    assert len(ledger.free) == 2


def test_a_place_that_goes_leaves_media_behind_it_apart() -> None:
    """What is left with one child is joined with it, except with one that begins with a media item."""
    index = CheckpointIndex(ledger := Ledger(4))
    key = PrefixKey(range(6), media=[(2, 4, b"cat")])
    before = store(ledger, index, key, 2)
    assert before is not None
    assert store(ledger, index, key, 5) is not None
    index.remove(before)
    longer = [PrefixKey(range(9), media=media) for media in ([(2, 4, b"cat")], [(2, 4, b"dog")], [])]
    assert [index.lookup(other).position for other in longer] == [5, 0, 0]
    assert index.get(key, 5) is not None


def test_no_two_identities_have_one_digest() -> None:
    letters = int.from_bytes(b"AAAA", "little")
    keys = [PrefixKey([letters, 7], adapter="x"), PrefixKey([7], adapter="xAAAA"), PrefixKey([7]), PrefixKey([7, 0])]
    keys += [PrefixKey([7], adapter=adapter) for adapter in ("", "n", "a")]
    assert len({key.digest() for key in keys}) == len(keys)
    assert keys[0].digest(0) != keys[0].digest()
    assert PrefixKey([letters, 9], adapter="x").digest(1) == keys[0].digest(1)
    for position in (-1, 3):
        with pytest.raises(ConfigError, match=f"position: got {position}; allowed: 0 .. 2"):
            keys[0].digest(position)
