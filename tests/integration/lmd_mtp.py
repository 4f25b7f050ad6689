#!/usr/bin/env python3
"""Greedy answers of a small random Qwen3.5 with MTP drafts, on a GPU, to be compared with those without drafts.

    python tests/integration/lmd_mtp.py make MODEL
    export PYTHONPATH=src:tests/integration/fa3_standin        # or with FlashAttention-3 installed
    python -m compact_state.integration tests/integration/lmd_mtp.py ask MODEL plain.json
    python -m compact_state.integration tests/integration/lmd_mtp.py ask MODEL drafts.json --drafts 3 --caching
    python tests/integration/lmd_mtp.py compare plain.json drafts.json --out summary.json
    python tests/integration/lmd_mtp.py judge MODEL plain.json drafts.json
    python tests/integration/lmd_mtp.py fit MODEL legacy.json --drafts 3 --budget 24      # lmdeploy's own pool
    python -m compact_state.integration tests/integration/lmd_mtp.py fit MODEL compact.json --drafts 3 --budget 119

The model's head knows few tokens, so that a random draft is right now and then: accepted counts of every size occur, which
`ask` records. The prompts are such that no two logits of an answer come nearer than `GAP`, more than bf16 evaluations of this
model differ by, so `compare` asks for equal ids. `judge` needs no GPU: it asks transformers about every token answered, and
about the logits.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

TOKENS = 4  # that the head can answer, in pairs of opposite rows: one of a pair beats every other token
GAP = 0.5  # at least, between the two largest logits (standard deviation 4) of every step, as transformers computes them in bf16
TOP = 4
NEW = 24
CHATS = 60  # that `fit` asks, more than lmdeploy's own pool has slots for
# Length and seed of prompts of their own, and of tails behind a shared beginning of 600 tokens: less than a conv window, a
# block and more, beyond an export, beyond one forward.
ALONE = ((2, 38), (2, 61), (3, 77), (3, 119), (70, 13), (70, 128), (700, 30), (700, 36), (1500, 266), (1500, 268))
TAILS = ((80, 206), (80, 246), (91, 87), (91, 139), (150, 204), (150, 228))


def make(out: Path, seed: int) -> None:
    """The checkpoint of `lmd_tiny` with a head of few tokens and an MTP layer, which transformers does not write."""
    import lmd_tiny
    import torch
    from safetensors.torch import load_file, save_file

    lmd_tiny.write_checkpoint(out, "tiny", seed)
    weights = load_file(out / "model.safetensors")
    head = next(name for name in weights if name.endswith("lm_head.weight"))
    rows, kept = weights[head][100 : 100 + TOKENS // 2], torch.zeros_like(weights[head])
    kept[100 : 100 + TOKENS] = torch.cat([rows, -rows])
    weights[head] = kept
    # Small beside what the layers add, or the last token alone would decide about the next.
    weights[next(name for name in weights if name.endswith("embed_tokens.weight"))][100 : 100 + TOKENS] *= 0.1
    full = next(name for name in weights if name.endswith("self_attn.q_proj.weight")).rsplit(".self_attn", 1)[0]
    layer = {name: weights[name].clone() for name in weights if name.startswith(full + ".")}
    weights |= {name.replace(full, "mtp.layers.0"): tensor for name, tensor in layer.items()}
    size = kept.shape[1]
    draw = torch.Generator().manual_seed(seed)
    weights["mtp.fc.weight"] = (torch.randn(size, 2 * size, generator=draw) * (2 * size) ** -0.5).to(kept.dtype)
    for norm in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        weights[f"mtp.{norm}.weight"] = torch.zeros(size, dtype=kept.dtype)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


def text(length: int, seed: int) -> str:
    """Random characters, one token each with the tokenizer of `lmd_tiny`."""
    draw = random.Random(seed)
    return "".join(draw.choice("abcdefghijklmnopqrstuvwxyz ,.") for _ in range(length))


def prompts() -> list[str]:
    """The prompts of `ask`."""
    return [*(text(*prompt) for prompt in ALONE), *(text(600, 1) + text(*tail) for tail in TAILS)]


def start(model: str, drafts: int, budget: int | None, eager: bool, blocks: int = 256) -> Any:
    """A pipeline with so many drafts and KV blocks; `budget`: slots for checkpoints, None = no prefix caching."""
    from lmdeploy import PytorchEngineConfig, pipeline
    from lmdeploy.messages import SpeculativeConfig

    config = PytorchEngineConfig(
        dtype="bfloat16",
        language_model_only=True,
        num_gpu_blocks=blocks,
        max_batch_size=8,
        session_len=4096,
        max_prefill_token_num=1024,
        block_size=64,
        enable_prefix_caching=budget is not None,
        prefix_cache_state_budget=budget or 0,
        eager_mode=eager,
        logprobs_mode="raw_logits",
    )
    spec = SpeculativeConfig(method="qwen3_5_mtp", num_speculative_tokens=drafts) if drafts else None
    return pipeline(model, backend_config=config, speculative_config=spec, log_level="INFO")


def ask(model: str, out: Path, drafts: int, caching: bool, eager: bool) -> None:
    """Ask alone, once more (from the cache, if there is one), and in one batch; write ids, logits and what was accepted."""
    began = time.monotonic()
    from compact_state.integration.lmdeploy.drafts import Trail

    accepted: Counter[int] = Counter()
    answer = Trail.answer

    def counted(self: Trail, count: int) -> None:
        accepted[count] += 1
        answer(self, count)

    Trail.answer = counted  # type: ignore[method-assign]
    from lmdeploy import GenerationConfig

    pipe = start(model, drafts, 24 if caching else None, eager)
    greedy = GenerationConfig(max_new_tokens=NEW, do_sample=False, ignore_eos=True, logprobs=TOP)

    def shown(answers: list[Any]) -> list[dict[str, Any]]:
        return [
            {
                "ids": [int(token) for token in a.token_ids],
                "cached": int(a.cached_tokens or 0),
                "top": [{int(t): round(float(v), 4) for t, v in step.items()} for step in a.logprobs],
            }
            for a in answers
        ]

    rounds = {}
    for name in ("alone", "again"):
        rounds[name] = shown([pipe([p], gen_config=greedy, do_preprocess=False)[0] for p in prompts()])
    rounds["batch"] = shown(pipe(prompts(), gen_config=greedy, do_preprocess=False))
    engine = pipe.async_engine.engine
    states, manager = engine.executor.model_agent.state_cache_engine, engine.scheduler.state_manager
    from compact_state.integration.lmdeploy import cache
    from compact_state.pool.invariants import check

    check(manager.ledger)
    legacy = sum(dtype.itemsize * math.prod(shape) for shape, dtype in engine.cache_config.states_shapes)
    result = {
        "drafts": drafts,
        "caching": caching,
        "eager": eager,
        "seconds": round(time.monotonic() - began, 1),
        "accepted": dict(sorted(accepted.items())),
        "slots": states.pool.shape[0],
        "slot_bytes": states.layout.slot_bytes,
        "slot_bytes_of_lmdeploy": legacy,
        "log_bytes": cache.log_bytes(list({id(log): log for log in states.draft_logs.values()}.values())),
        "hits": manager.ledger.counters.hits,
        "publishes": manager.ledger.counters.publishes,
        "rounds": rounds,
    }
    out.write_text(json.dumps(result))
    print({name: value for name, value in result.items() if name != "rounds"}, flush=True)
    # The engine's threads are daemons of a pipeline that nobody asks any more.
    os._exit(0)


def fit(model: str, out: Path, drafts: int, budget: int) -> None:
    """Ask `CHATS` prompts, then each with more behind it; write how many tokens were found, and the bytes that took."""
    from lmdeploy import GenerationConfig

    pipe = start(model, drafts, budget, eager=False, blocks=2048)
    engine, found = pipe.async_engine.engine, []
    first = [text(700, 5000 + chat) for chat in range(CHATS)]
    for turn in (first, [said + text(150, 6000 + chat) for chat, said in enumerate(first)]):
        answers = pipe(
            turn, gen_config=GenerationConfig(max_new_tokens=2, do_sample=False, ignore_eos=True), do_preprocess=False
        )
        found.append(sum(int(a.cached_tokens or 0) for a in answers))
    states, logs = engine.executor.model_agent.state_cache_engine, 0
    if hasattr(states, "draft_logs"):
        from compact_state.integration.lmdeploy import cache

        logs = cache.log_bytes(list({id(log): log for log in states.draft_logs.values()}.values()))
    result = {
        "pool": type(states).__name__,
        "drafts": drafts,
        "slots": engine.executor.cache_config.num_state_caches,
        "state_bytes": int(states.allocation.nbytes),
        "log_bytes": logs,
        "checkpoints": int(engine.scheduler.state_manager.get_num_allocated_checkpoint_states()),
        "prompts": CHATS,
        "tokens": sum(map(len, first)),
        "found": found,
    }
    out.write_text(json.dumps(result) + "\n")
    print(result, flush=True)
    os._exit(0)


def compare(plain: dict[str, Any], drafts: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Print how far the answers agree; returns the run in figures and what speaks against equality."""
    faults, equal, count = [], 0, 0
    for name, answers in drafts["rounds"].items():
        for number, answered in enumerate(answers):
            count += 1
            known = plain["rounds"][name][number]["ids"]
            if known == answered["ids"]:
                equal += 1
            else:
                faults.append(f"{name} {number}: {known} and {answered['ids']}")
    answers = {tuple(a["ids"]) for a in plain["rounds"]["alone"]}
    if len(answers) < len(plain["rounds"]["alone"]) or any(len(set(ids)) < 2 for ids in answers):
        faults.append("the answers do not vary: equality would prove nothing")
    if not set(range(1, 2 + min(drafts["drafts"], 3))) <= set(map(int, drafts["accepted"])):
        faults.append(f"accepted counts {drafts['accepted']}: not every number of drafts was accepted")
    if drafts["caching"] and not (drafts["hits"] and any(a["cached"] for a in drafts["rounds"]["again"])):
        faults.append("nothing was found in the cache")
    if drafts["slot_bytes"] != plain["slot_bytes"]:
        faults.append(f"a slot of {drafts['slot_bytes']} bytes with drafts, of {plain['slot_bytes']} without")
    summary = {name: value for name, value in drafts.items() if name != "rounds"}
    summary |= {"equal": equal, "answers": count, "passed": not faults}
    print(summary, *faults, sep="\n  ")
    return summary, faults


def judge(model: str, runs: dict[str, dict[str, Any]]) -> list[str]:
    """Print how far each run's logits are from those of transformers; returns the tokens that it would not answer."""
    import torch
    from transformers import AutoTokenizer, Qwen3_5ForConditionalGeneration

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = Qwen3_5ForConditionalGeneration.from_pretrained(model, dtype=torch.bfloat16)
    asked, faults = [tokenizer(p)["input_ids"] for p in prompts()], []
    known: dict[tuple[int, ...], Any] = {}
    for name, run in runs.items():
        squares, worst, other, narrow = [], 0.0, 0, float("inf")
        for number, answered in ((n, a) for answers in run["rounds"].values() for n, a in enumerate(answers)):
            question, ids = asked[number], answered["ids"]
            key = (*question, *ids[:-1])
            if key not in known:
                with torch.no_grad():
                    known[key] = network(torch.tensor([key])).logits[0, len(question) - 1 :].float()
            logits = known[key]
            other += int((logits.argmax(-1) != torch.tensor(ids)).sum())
            best = logits.topk(2).values
            narrow = min(narrow, float((best[:, 0] - best[:, 1]).min()))
            for step, top in enumerate(answered["top"]):
                differences = [abs(value - float(logits[step, int(token)])) for token, value in top.items()]
                squares += [difference**2 for difference in differences]
                worst = max(worst, *differences)
        tokens = sum(len(a["ids"]) for answers in run["rounds"].values() for a in answers)
        rms = (sum(squares) / len(squares)) ** 0.5
        print(
            f"{name}: {tokens} tokens answered, {other} of them not as transformers does; smallest gap {narrow:.3f}; "
            f"logits differ by {rms:.3f} rms, {worst:.3f} at most"
        )
        if other or narrow < GAP:
            faults.append(f"{name}: {other} other tokens, smallest gap {narrow}")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="write the checkpoint")
    making.add_argument("model", type=Path)
    making.add_argument("--seed", type=int, default=0)
    asking = commands.add_parser("ask", help="run one engine")
    asking.add_argument("model")
    asking.add_argument("out", type=Path)
    asking.add_argument("--drafts", type=int, default=0)
    asking.add_argument("--caching", action="store_true")
    asking.add_argument("--graphs", action="store_true", help="CUDA graphs; eager without")
    fitting = commands.add_parser("fit", help="what is found again of more prompts than a pool has slots for")
    fitting.add_argument("model")
    fitting.add_argument("out", type=Path)
    fitting.add_argument("--drafts", type=int, default=0)
    fitting.add_argument("--budget", type=int, required=True, help="slots for checkpoints")
    comparing = commands.add_parser("compare", help="answers of the first file with those of the others")
    comparing.add_argument("files", type=Path, nargs="+")
    comparing.add_argument("--out", type=Path, help="JSON of every run's figures, by the name of its file")
    judging = commands.add_parser("judge", help="every token answered, beside transformers")
    judging.add_argument("model")
    judging.add_argument("files", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "make":
        make(arguments.model, arguments.seed)
    elif arguments.command == "ask":
        ask(arguments.model, arguments.out, arguments.drafts, arguments.caching, not arguments.graphs)
    elif arguments.command == "fit":
        fit(arguments.model, arguments.out, arguments.drafts, arguments.budget)
    elif arguments.command == "judge":
        runs = {file.stem: json.loads(file.read_text()) for file in arguments.files}
        faults = judge(arguments.model, runs)
        print(*faults, sep="\n")
        sys.exit(1 if faults else 0)
    else:
        plain, *others = (json.loads(file.read_text()) for file in arguments.files)
        found = {file.stem: compare(plain, other) for file, other in zip(arguments.files[1:], others)}
        if arguments.out is not None:
            arguments.out.write_text(
                json.dumps({name: summary for name, (summary, _) in found.items()}, indent=1) + "\n"
            )
        sys.exit(0 if all(summary["passed"] for summary, _ in found.values()) else 1)


if __name__ == "__main__":
    main()
