"""The OpenAI-compatible server as the README starts it, asked with curl, stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .fleet import ENABLE, EngineError

PORT = 23333
SERVE = ["-m", "compact_state.integration", "-m", "lmdeploy", "serve", "api_server"]
OPTIONS = ["--backend", "pytorch", "--num-gpu-blocks", "4096", "--enable-prefix-caching"]
OPTIONS += ["--prefix-cache-state-budget", "64", "--language-model-only"]


def question(model: str, text: str) -> dict[str, Any]:
    """The body of the README's example."""
    return {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 16, "temperature": 0}


def curl(port: int, path: str, body: dict[str, Any] | None = None, limit_s: int = 60) -> str:
    """One HTTP request, by curl; empty when the server does not answer."""
    command = ["curl", "-s", "--max-time", str(limit_s), f"http://localhost:{port}{path}"]
    if body is not None:
        command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    return subprocess.run(command, capture_output=True, text=True).stdout


def run(
    model: str, *, log: Path, limit_s: float, variant: str = "compact", eager: bool = False, port: int = PORT
) -> dict[str, Any]:
    """Start, ask the same question twice, stop. Raises EngineError with the log's end when it does not serve in time.

    `variant`: compact puts the launcher in front; installed has the switch alone; legacy is lmdeploy's own engine. The second
    answer comes with its token ids.
    """
    program, on = SERVE if variant == "compact" else SERVE[2:], variant != "legacy"
    command = [sys.executable, *program, model, "--server-port", str(port), "--log-level", "INFO", *OPTIONS]
    command += ["--eager-mode"] if eager else []
    environment = {**os.environ, ENABLE: "1" if on else "0", "LMDEPLOY_ENABLE_CHECK_ENV": "0"}
    began = time.monotonic()
    process = subprocess.Popen(
        command, stdout=log.open("w"), stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )
    try:
        while not (models := curl(port, "/v1/models", limit_s=5)):
            if process.poll() is not None or time.monotonic() - began > limit_s:
                raise EngineError(f"the server does not answer:\n{log.read_text()[-3000:]}")
            time.sleep(0.5)
        start_s = round(time.monotonic() - began, 1)
        name = json.loads(models)["data"][0]["id"]
        text = "Which state does this prompt leave behind? " * 40
        questions = [question(name, text), {**question(name, text), "return_token_ids": True}]
        answers = [json.loads(curl(port, "/v1/chat/completions", body)) for body in questions]
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
    line = next((line for line in log.read_text().splitlines() if "Enable unified compact state" in line), None)
    contents = [answer["choices"][0]["message"]["content"] for answer in answers]
    return {
        "variant": variant,
        "command": " ".join(["python", *command[1:]]).replace(model, "MODEL"),
        "start_s": start_s,
        "log": None if line is None else line[line.index("Enable") :],
        "usage": [answer["usage"] for answer in answers],
        "answers_equal": contents[0] == contents[1],
        "ids": answers[1]["choices"][0].get("output_ids"),
        "passed": (line is not None) == on and all(contents),
    }
