"""What the comparison with drafts on a GPU stands on: the stand-in for FlashAttention-3, and the comparison itself."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import lmd_mtp
import pytest
import torch


@pytest.fixture(scope="module")
def standin() -> ModuleType:
    file = Path(__file__).parent / "fa3_standin" / "flash_attn_interface.py"
    spec = importlib.util.spec_from_file_location("standin", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One sequence, `q [T, H, D]`, `k, v [L, KV, D]`, its queries at the end."""
    length, total = len(q), len(k)
    mask = torch.arange(total)[None] <= torch.arange(total - length, total)[:, None]
    heads = [t.transpose(0, 1) for t in (q, k, v)]
    return torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True).transpose(0, 1)


def test_the_standin_attends_over_pages_and_sees_nothing_else(standin: ModuleType) -> None:
    block, lengths, tokens = 4, [3, 11, 8], 3
    k, v = torch.full((2, 9, block, 2, 8), float("nan"))
    pages = torch.tensor([[5, 0, 0], [1, 7, 2], [8, 3, 0]], dtype=torch.int32)
    q = torch.randn(3, tokens, 4, 8)
    wanted = []
    for row, length in enumerate(lengths):
        keys, values = torch.randn(2, length, 2, 8)
        for t in range(length):
            page = pages[row, t // block].long()
            k[page, t % block], v[page, t % block] = keys[t], values[t]
        wanted.append(dense(q[row], keys, values))
    out = standin.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=torch.tensor(lengths, dtype=torch.int32), page_table=pages, causal=True
    )
    torch.testing.assert_close(out, torch.stack(wanted))


def test_the_standin_attends_over_packed_sequences(standin: ModuleType) -> None:
    new, known = [3, 1, 5], [3, 9, 7]
    q, k, v = torch.randn(sum(new), 4, 8), torch.randn(sum(known) + 6, 2, 8), torch.randn(sum(known) + 6, 2, 8)
    cu_q, cu_k = (torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()]) for n in (new, known))
    out = standin.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 9, causal=True)
    for row in range(3):
        mine, theirs = slice(cu_q[row], cu_q[row + 1]), slice(cu_k[row], cu_k[row + 1])
        torch.testing.assert_close(out[mine], dense(q[mine], k[theirs], v[theirs]))


def run(ids: list[list[int]], **changes: Any) -> dict[str, Any]:
    """A record of `lmd_mtp ask`."""
    answers = [{"ids": row, "cached": 64, "top": []} for row in ids]
    record = {"drafts": 1, "caching": True, "hits": 1, "accepted": {"1": 4, "2": 5}, "slot_bytes": 8}
    return {**record, **changes, "rounds": {"alone": answers, "again": answers}}


def test_the_comparison_finds_what_speaks_against_equality() -> None:
    ids = [[0, 1, 1], [1, 0, 1]]
    plain = run(ids, drafts=0)

    def fault(word: str, drafts: dict[str, Any], base: dict[str, Any] = plain) -> bool:
        summary, faults = lmd_mtp.compare(base, drafts)
        assert summary["passed"] is not bool(faults)
        return any(word in text for text in faults)

    summary, faults = lmd_mtp.compare(plain, run(ids))
    assert (summary["equal"], summary["answers"], summary["passed"], faults) == (4, 4, True, [])
    assert fault("alone 1", run([[0, 1, 1], [1, 0, 0]]))
    assert fault("alone 1", run([[0, 1, 1], [1, 0]]))
    assert fault("accepted counts", run(ids, accepted={"1": 9}))
    assert fault("cache", run(ids, hits=0))
    assert fault("16 bytes", run(ids, slot_bytes=16))
    same = run([[0, 0, 0], [0, 0, 0]])
    assert fault("vary", same, same)
