"""Tables of hardware counters, from ncu's own output."""

from __future__ import annotations

from compact_state.perf import inside
from compact_state.perf.cases import registry

NAMES = ["ID", "Kernel Name", "gpu__time_duration.sum", "dram__bytes.sum.per_second", inside.WARPS]
NAMES += [f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio" for name in ("wait", "selected", "drain")]


def page(*rows: list[str]) -> str:
    units = [""] * len(NAMES)
    lines = ["==PROF== Disconnected", *(",".join(f'"{cell}"' for cell in row) for row in (NAMES, units, *rows))]
    return "\n".join(lines)


def test_kernels_stand_under_the_case_whose_mark_came_before() -> None:
    spin = ["at::cuda::<unnamed>::spin_kernel(long)", "1,000", "0", "1", "0", "1", "0"]
    ours = ["recurrent_decode_gdn_f32_0", "68,544", "3,588,941,176,470.59", "34.66", "3.0", "1.0", "0.0"]
    text = inside.table(page(["0", *spin], ["1", *ours], ["2", *spin], ["3", *ours]), ["first:case", "second:case"])
    lines = [line for line in text.splitlines() if line.startswith(("first", "second", "  rec"))]
    assert [line.split()[0] for line in lines] == [
        "first:case", "recurrent_decode_gdn_f32_0", "second:case", "recurrent_decode_gdn_f32_0",
    ]  # fmt: skip
    assert lines[1].split()[1:3] == ["68.54", "3.59"]
    assert "34.7" in lines[1]
    assert lines[1].endswith("wait 75 %, selected 25 %, drain 0 %")
    assert "spin" not in text


def test_names_lose_their_arguments() -> None:
    assert inside._kernel("at::cuda::<unnamed>::spin_kernel(long)") == "spin_kernel"
    assert inside._kernel("void at::native::reduce<512, foo<bar<1>>>(baz<int>)") == "reduce"
    assert inside._kernel("gdn_prefill_f32_0") == "gdn_prefill_f32_0"


def test_the_hottest_instructions_come_first_with_their_reasons() -> None:
    header = f'"Address","Source","{inside.SAMPLES}","stall_wait","stall_wait (Not Issued)","stall_gmma"'
    text = "\n".join([
        '"Kernel Name","at::spin_kernel(long)"', header, '"0x0","EXIT","9","9","9","0"',
        '"Kernel Name","gdn_prefill_f32_0"', header,
        '"0x0","      MOV R1, R2","10","2","2","0"', '"0x1","      HGMMA R1","30","4","4","1,026"',
    ])  # fmt: skip
    lines = inside.hot_lines(text).splitlines()
    assert lines[0] == "gdn_prefill_f32_0: 40 samples of 2 instructions"
    assert lines[1].split()[:4] == ["75.0", "%", "#1", "HGMMA"]
    assert lines[1].endswith("gmma 1026, wait 4")
    assert lines[2].split()[:4] == ["25.0", "%", "#0", "MOV"]


def test_every_case_that_is_looked_into_is_in_the_registry() -> None:
    assert set(inside.CASES) <= {case.name for case in registry()}
