#!/usr/bin/env python3
"""One lmdeploy engine on a GPU under a fixed load; with or without the compact pool, as the environment says.

    python tests/integration/lmd_tiny.py MODEL --shape 0.8b
    python tests/integration/lmd_load.py MODEL legacy.json
    PYTHONPATH=src python -m compact_state.integration tests/integration/lmd_load.py MODEL compact.json

`--rounds` asks for the answers of eight prompts instead, alone, once more, in one batch and grown by 30 tokens, with the
raw logits of the 16 likeliest tokens of every step: two such files show which ids part, and by what margin.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path
from typing import Any

ALPHABET = "abcdefghijklmnopqrstuvwxyz ,."
TOP = 16


def text(length: int, seed: int) -> str:
    """Random text; one token a character with the tokenizer of lmd_tiny."""
    draw = random.Random(seed)
    return "".join(draw.choice(ALPHABET) for _ in range(length))


def prompts() -> list[str]:
    """One token, less than a conv window, less than a block, beyond an export, shared prefixes, beyond one forward."""
    shared = text(600, 1)
    return [
        text(1, 2),
        text(3, 3),
        text(70, 4),
        text(700, 5),
        shared + text(100, 6),
        shared + text(41, 7),
        shared + text(2, 8),
        text(2500, 9),
    ]


def rounds(pipe: Any) -> list[dict[str, Any]]:
    """Greedy answers of 24 tokens to the eight prompts, four times."""
    from lmdeploy import GenerationConfig

    config = GenerationConfig(max_new_tokens=24, do_sample=False, ignore_eos=True, logprobs=TOP)
    asked = prompts()

    def alone() -> list[Any]:
        return [pipe([prompt], gen_config=config, do_preprocess=False)[0] for prompt in asked]

    def kept(tag: str, answers: list[Any]) -> dict[str, Any]:
        logits = [
            [
                sorted(((int(t), round(float(v), 4)) for t, v in step.items()), key=lambda p: -p[1])
                for step in a.logprobs
            ]
            for a in answers
        ]
        return {
            "tag": tag,
            "ids": [a.token_ids for a in answers],
            "cached": [a.cached_tokens for a in answers],
            "in": [a.input_token_len for a in answers],
            "top": logits,
        }

    grown = [prompt + text(30, 50 + i) for i, prompt in enumerate(asked)]
    return [
        kept("solo", alone()),
        kept("again", alone()),
        kept("batch", pipe(asked, gen_config=config, do_preprocess=False)),
        kept("grown", pipe(grown, gen_config=config, do_preprocess=False)),
    ]


def load(pipe: Any) -> list[dict[str, Any]]:
    """Batches of prompts of 2048 tokens, of which one of four beginnings of 1024 is shared; a first batch warms up."""
    from lmdeploy import GenerationConfig

    shared = [text(1024, seed) for seed in range(4)]

    def batch(count: int, new: int, seed: int) -> dict[str, Any]:
        asked = [shared[i % 4] + text(1024, seed * 1000 + i) for i in range(count)]
        config = GenerationConfig(max_new_tokens=new, do_sample=False, ignore_eos=True)
        began = time.monotonic()
        answers = pipe(asked, gen_config=config, do_preprocess=False)
        seconds = time.monotonic() - began
        return {
            "requests": count,
            "output_tokens": new,
            "seconds": round(seconds, 3),
            "output_tok_s": round(sum(a.generate_token_len for a in answers) / seconds, 1),
            "input_tokens": sum(a.input_token_len for a in answers),
            "cached_tokens": sum(a.cached_tokens for a in answers),
        }

    return [batch(16, 16, 1), *(batch(64, new, seed + (10 if new == 1 else 0)) for seed in (2, 3) for new in (128, 1))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint that lmd_tiny.py wrote")
    parser.add_argument("out", type=Path, help="JSON to write")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--no-caching", action="store_true", help="prefix caching off")
    parser.add_argument("--rounds", action="store_true", help="answers and logits instead of load")
    arguments = parser.parse_args()
    began = time.monotonic()
    import torch
    from lmdeploy import PytorchEngineConfig, pipeline

    sizes: dict[str, Any] = (
        {"num_gpu_blocks": 512, "max_batch_size": 8, "max_prefill_token_num": 2048, "prefix_cache_state_budget": 24}
        if arguments.rounds
        else {
            "num_gpu_blocks": 4096,
            "max_batch_size": 64,
            "max_prefill_token_num": 8192,
            "prefix_cache_state_budget": 64,
        }
    )
    config = PytorchEngineConfig(
        dtype="bfloat16",
        language_model_only=True,
        session_len=8192,
        block_size=64,
        eager_mode=arguments.eager,
        enable_prefix_caching=not arguments.no_caching,
        logprobs_mode="raw_logits",
        **sizes,
    )
    pipe = pipeline(arguments.model, backend_config=config, log_level="INFO")
    torch.cuda.synchronize()
    engine = pipe.async_engine.engine
    states = engine.executor.model_agent.state_cache_engine
    result: dict[str, Any] = {
        "engine": type(states).__name__,
        "start_s": round(time.monotonic() - began, 1),
        "state_bytes": int(states.allocation.nbytes),
    }
    result["rounds" if arguments.rounds else "load"] = (rounds if arguments.rounds else load)(pipe)
    result["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
    manager = engine.scheduler.state_manager
    if hasattr(manager, "ledger"):
        from compact_state.pool.invariants import check

        check(manager.ledger)
        result["ledger"] = {name: getattr(manager.ledger.counters, name) for name in manager.ledger.counters.__slots__}
    arguments.out.write_text(json.dumps(result))
    print(json.dumps({k: v for k, v in result.items() if k != "rounds"}), flush=True)
    # The engine's threads are daemons of a pipeline that nobody asks any more.
    os._exit(0)


if __name__ == "__main__":
    main()
