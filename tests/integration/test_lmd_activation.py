"""Turning the adapter on and off: byte-identical when off, every process when on, refusals in words."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from compact_state.integration import _boot, envs
from compact_state.integration.lmdeploy import pins

pytestmark = pytest.mark.lmdeploy
pytest.importorskip("lmdeploy", reason="lmdeploy is not installed")

ROOT = Path(__file__).resolve().parents[2]
HOOK = ROOT / "integration" / "_site"


def run(
    code: str,
    switch: str | None,
    *,
    hook: bool = True,
    arguments: tuple[str, ...] = ("-c",),
    first: Path | None = None,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that starts as an installed library's does: the start-up hook, then `code`.

    `first`: a folder at the head of the path.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("LMDEPLOY_", "COMPACT_STATE_"))}
    paths = [str(HOOK)] if hook else []
    paths += [] if first is None else [str(first)]
    environment["PYTHONPATH"] = os.pathsep.join([*paths, str(ROOT / "src")])
    environment.update(variables)
    if switch is not None:
        environment[envs.ENABLE] = switch
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments, textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder with an lmdeploy of two files, which imports in no time: its real version and its real environment module."""
    source = Path(next(iter(importlib.util.find_spec("lmdeploy").submodule_search_locations)))
    package = tmp_path / "path" / "lmdeploy"
    (package / "pytorch").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "pytorch" / "__init__.py").touch()
    for name in ("version.py", "pytorch/envs.py"):
        (package / name).write_text((source / name).read_text())
    return package.parent


REPORT = """
    import json, sys
    import lmdeploy.pytorch.engine.engine, lmdeploy.pytorch.engine.engine_loop, lmdeploy.pytorch.engine.inputs_maker
    import lmdeploy.pytorch.strategies.ar, lmdeploy.pytorch.strategies.ar.step_inputs
    import lmdeploy.pytorch.strategies.ar.model_agent, lmdeploy.pytorch.strategies.ar.sampling
    import lmdeploy.pytorch.backends.cuda.graph_runner
    from lmdeploy.pytorch.strategies.ar_spec import model_inputs, sequence, step_inputs
    import lmdeploy.pytorch.models.qwen3_5, lmdeploy.pytorch.engine.model_agent.agent
    import lmdeploy.pytorch.backends.cuda.op_backend, lmdeploy.pytorch.configurations
    names = TARGETS
    def place(value):
        return getattr(getattr(value, "__code__", None), "co_filename", None) or getattr(value, "__module__", "")
    foreign, marked = [], []
    for name in names:
        module = sys.modules[name]
        if getattr(module, "__compact_state__", False):
            marked.append(name)
        for key, value in vars(module).items():
            inner = list(vars(value).items()) if isinstance(value, type) and value.__module__ == name else []
            for path, thing in [(key, value), *((f"{key}.{k}", getattr(v, "__func__", v)) for k, v in inner)]:
                if "compact_state" in str(place(thing)) or "/integration/" in str(place(thing)):
                    foreign.append(f"{name}.{path}")
    print(json.dumps({
        "foreign": foreign, "marked": marked, "missing": [n for n in names if n not in sys.modules],
        "ours": sorted(m for m in sys.modules if m.startswith("compact_state.") and m != "compact_state.integration"),
        "finders": [type(f).__module__ for f in sys.meta_path if "compact_state" in type(f).__module__],
    }))
""".replace("TARGETS", repr(list(_boot.TARGETS)))


def report(switch: str | None, **variables: str) -> dict[str, list[str]]:
    done = run(REPORT, switch, **variables)
    assert done.returncode == 0, done.stderr
    result: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    assert result["missing"] == []
    return result


def test_on_every_target_is_patched() -> None:
    on = report("1")
    assert sorted(on["marked"]) == sorted(_boot.TARGETS)
    touched = {name for name in _boot.TARGETS if any(path.startswith(name + ".") for path in on["foreign"])}
    values_only = {"lmdeploy.pytorch.envs", "lmdeploy.pytorch.nn.linear.default"}
    assert touched >= set(_boot.TARGETS) - values_only


def test_short_steps_off_their_patches_are_left_out() -> None:
    short, whole = (set(report("1", LMDEPLOY_COMPACT_SHORT_STEPS=word)["foreign"]) for word in ("on", "off"))
    assert whole < short
    assert set(report("1")["foreign"]) == short
    left_out = {
        "engine.engine_loop.EngineLoop._make_infer_outputs",
        "engine.model_agent.agent.model_forward",
        "engine.model_agent.agent.BaseModelAgent.get_output_async",
        "strategies.ar.sampling.ARSamplingStrategy.make_sampling_inputs",
        "strategies.ar.sequence.ARSequenceStrategy.update_running",
        "strategies.ar.step_inputs.ARStepInputs.reindex",
        "backends.cuda.graph_runner.runner.CUDAGraphRunner.compact_replay",
    }
    assert short - whole >= {f"lmdeploy.pytorch.{name}" for name in left_out}


def test_off_no_attribute_of_lmdeploy_is_ours() -> None:
    off = report(None)
    assert off["foreign"] == []
    assert off["marked"] == []
    assert off["finders"] == []
    # The hook for PYTHONPATH installs imports the two standard-library modules that read the switch; the wheel's `.pth`
    # line does not even do that (below).
    assert off["ours"] == ["compact_state.integration._boot", "compact_state.integration.envs"]


@pytest.mark.parametrize("switch", ["0", "off", "False"])
def test_off_by_a_word_leaves_no_finder(switch: str) -> None:
    done = run("import sys; print([f for f in sys.meta_path if 'compact_state' in type(f).__module__])", switch)
    assert done.stdout.strip() == "[]", done.stderr


def pth_line() -> str:
    namespace: dict[str, object] = {"__file__": str(ROOT / "setup.py"), "__name__": "setup_file"}
    exec(compile((ROOT / "setup.py").read_text(), "setup.py", "exec"), namespace)
    return str(namespace["PTH_LINE"])


def test_the_pth_line_imports_nothing_of_ours_when_off_and_boots_when_on(tmp_path: Path) -> None:
    line = pth_line()
    assert line.startswith("import ")
    assert line.count("\n") == 1
    (tmp_path / "hook.pth").write_text(line)
    code = f"""
        import site, sys
        site.addsitedir({str(tmp_path)!r})
        print(sorted(m for m in sys.modules if m.startswith("compact_state")))
    """
    for switch in (None, "0", "off", "FALSE"):
        assert run(code, switch, hook=False).stdout.strip() == "[]", switch
    for switch in ("1", "on", "yes", " True "):
        assert "compact_state.integration._boot" in run(code, switch, hook=False).stdout, switch


@pytest.mark.parametrize(
    ("word", "value"), [("TRUE", True), (" on ", True), ("0", False), ("No", False), (None, False)]
)
def test_the_switch_reads_words_as_lmdeploy_does(
    word: str | None, value: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(envs.ENABLE, raising=False)
    if word is not None:
        monkeypatch.setenv(envs.ENABLE, word)
    from lmdeploy.pytorch.envs import env_to_bool

    assert envs.enabled() is value
    assert env_to_bool(envs.ENABLE) is value


@pytest.mark.parametrize("word", ["", "2", "maybe"])
def test_a_misspelt_switch_fails_where_lmdeploy_is_imported_and_nowhere_else(word: str, small: Path) -> None:
    assert run("print('fine')", word).stdout.strip() == "fine"
    done = run("import lmdeploy.pytorch.envs", word, first=small)
    assert done.returncode != 0
    assert envs.ENABLE in done.stderr
    assert "Allowed true values" in done.stderr


def test_settings_travel_through_lmdeploys_environment_forwarding(small: Path) -> None:
    code = """
        from lmdeploy.pytorch import envs
        for name, value in sorted(envs.get_all_envs().items()):
            if "COMPACT" in name or name == "PYTHONPATH":
                print(name, value)
    """
    lines = run(code, "1", first=small, LMDEPLOY_COMPACT_PREFILL_SAVE_ALIGNMENT="1024").stdout.splitlines()
    assert lines[:2] == ["LMDEPLOY_COMPACT_PREFILL_SAVE_ALIGNMENT 1024", "LMDEPLOY_ENABLE_COMPACT_STATE 1"]
    assert lines[2].startswith("PYTHONPATH ")
    assert run(code, None, first=small).stdout == ""


def test_a_child_of_the_module_launcher_is_patched_too(small: Path) -> None:
    script = small / "program.py"
    child = "import lmdeploy.pytorch.envs as e; print(e.__compact_state__)"
    script.write_text(
        f"import subprocess, sys, lmdeploy.pytorch.envs as e\nprint(e.__compact_state__, sys.argv[1:], flush=True)\n"
        f"subprocess.run([sys.executable, '-W', 'ignore', '-c', {child!r}])\n"
    )
    done = run(str(script), None, hook=False, arguments=("-m", "compact_state.integration"), first=small)
    assert done.stdout.splitlines() == ["True []", "True"], done.stderr
    module = run("program", None, hook=False, arguments=("-m", "compact_state.integration", "-m"), first=small)
    assert module.stdout.splitlines() == ["True []", "True"], module.stderr
    off = run(str(script), "0", hook=False, arguments=("-m", "compact_state.integration"), first=small)
    assert off.stdout == ""
    assert "__compact_state__" in off.stderr


def test_a_sitecustomize_that_is_hidden_runs_as_well(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('theirs')\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HOOK), str(ROOT / "src"), str(tmp_path)])}
    done = subprocess.run([sys.executable, "-c", ""], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout.strip() == "theirs"


def test_install_after_lmdeploy_was_imported_is_refused(small: Path) -> None:
    code = "import lmdeploy.pytorch.envs\nfrom compact_state.integration import install\ninstall()"
    done = run(code, None, hook=False, first=small)
    assert done.returncode != 0
    assert "before lmdeploy is imported; already imported: lmdeploy.pytorch.envs" in done.stderr


def test_another_version_is_refused_with_what_to_do() -> None:
    with pytest.raises(
        pins.UnsupportedLmdeployError, match=r"fits lmdeploy 0\.18\.0 and found 0\.19\.1.*Install lmdeploy==0\.18\.0"
    ):
        pins.check_version("0.19.1")


def test_a_changed_source_is_refused_by_name(small: Path) -> None:
    file = small / "lmdeploy" / "pytorch" / "envs.py"
    file.write_text(file.read_text().replace("return _ENVS", "return dict(_ENVS)"))
    done = run("import lmdeploy.pytorch.envs", "1", first=small)
    assert done.returncode != 0
    assert "lmdeploy.pytorch.envs differs from the released source in get_all_envs" in done.stderr
    assert run("import lmdeploy.pytorch.envs", "0", first=small).returncode == 0


def test_every_target_is_pinned_and_every_pin_is_recorded() -> None:
    assert {f"lmdeploy.pytorch.{key}" for key in pins.PINNED} == set(_boot.TARGETS)
    assert {key: sorted(names) for key, names in pins._recorded().items()} == {
        key: sorted(names) for key, names in pins.PINNED.items()
    }
