#!/usr/bin/env python3
"""Write a small random Qwen3.5 checkpoint, with tokenizer, whose answers depend on the whole prompt.

    python lmd_tiny.py OUT_DIR [--shape tiny|small|moe|0.8b|35b] [--seed N] [--device cuda]

Drawn as transformers draws it, such a model answers one token for ever: the residual stream carries the embedding of the
last token to a head that is that same embedding. Here the head is a matrix of its own, every projection keeps the scale
of its input, and the gates decay slowly, so that the states of the linear layers decide the answer.

Needs torch, numpy, transformers (made with 5.17), tokenizers. No GPU. Every machine writes the same weights, unless
they are drawn on a GPU, which takes seconds where a CPU takes minutes.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<unk>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "max_position_embeddings": 8192,
}
# As small, with the linear layers of the 0.8B model: kernels that are built for head counts are the same.
_SMALL: dict[str, Any] = {**_TINY, "linear_num_key_heads": 16, "linear_num_value_heads": 16}
_EXPERTS = {"num_experts": 4, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _TINY,
    "small": _SMALL,
    # Every token uses every expert: where a router chooses, an error of rounding may become another choice.
    "moe": {**{k: v for k, v in _SMALL.items() if k != "intermediate_size"}, **_EXPERTS, "num_experts_per_tok": 4},
    # The layer widths of Qwen3.5-0.8B with a small vocabulary: random weights have no use for a large one.
    "0.8b": {
        "vocab_size": 8192,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "max_position_embeddings": 65536,
    },
    # The linear and attention layers of Qwen3.5-35B-A3B; a dense block as wide as the experts that one token uses.
    "35b": {
        "vocab_size": 8192,
        "hidden_size": 2048,
        "intermediate_size": 4608,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "max_position_embeddings": 65536,
    },
}


def make_config(shape: str = "tiny") -> Any:
    """The Qwen3_5Config, or Qwen3_5MoeConfig: three linear-attention layers, then one of full attention, repeated."""
    from transformers import Qwen3_5Config, Qwen3_5MoeConfig

    sizes = SHAPES[shape]
    pairs = int(sizes["head_dim"] * 0.25) // 2
    width = pairs // 3
    text = {
        **sizes,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (sizes["num_hidden_layers"] // 4),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [(pairs - width + 1) // 2, (pairs - width) // 2, width],
            "mrope_interleaved": True,
        },
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "attn_output_gate": True,
        "tie_word_embeddings": False,
        "mtp_num_hidden_layers": 1,
        "dtype": "bfloat16",
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    vision = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": sizes["hidden_size"],
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 16,
    }
    return (Qwen3_5MoeConfig if "num_experts" in sizes else Qwen3_5Config)(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        image_token_id=500,
        video_token_id=501,
        vision_start_token_id=502,
        vision_end_token_id=503,
        dtype="bfloat16",
    )


def _rule(name: str, shape: tuple[int, ...]) -> tuple[float, float] | float:
    """How one parameter is drawn: uniform between two bounds, or normal of this deviation."""
    if name.endswith("A_log"):
        return -5.0, -1.0
    if name.endswith("dt_bias"):
        return -2.0, 0.0
    if name.endswith("conv1d.weight"):
        return 0.5
    if name.endswith("embed_tokens.weight"):
        return 1.0
    if name.endswith("lm_head.weight"):
        # Wide logits: a bf16 rounding elsewhere seldom changes the largest one.
        return 4.0 * float(shape[-1] ** -0.5)
    return 0.02 if "visual" in name else float(shape[-1] ** -0.5)


def _drawn(parameter: torch.Tensor, name: str, seed: int) -> torch.Tensor:
    """Values for one parameter, decided by its name and shape alone: the same on every machine and torch."""
    draw = np.random.default_rng([seed, zlib.crc32(name.encode())])
    shape = tuple(parameter.shape)
    rule = _rule(name, shape)
    uniform = isinstance(rule, tuple)
    values = draw.uniform(*rule, shape) if uniform else draw.standard_normal(shape, np.float32) * np.float32(rule)
    return torch.from_numpy(np.asarray(values, np.float32)).to(parameter.dtype)


def model_class(shape: str) -> Any:
    """transformers' class of the whole model."""
    from transformers import Qwen3_5ForConditionalGeneration, Qwen3_5MoeForConditionalGeneration

    return Qwen3_5MoeForConditionalGeneration if "num_experts" in SHAPES[shape] else Qwen3_5ForConditionalGeneration


@torch.no_grad()
def make_model(shape: str = "tiny", seed: int = 0) -> Any:
    """The random model in bfloat16."""
    model = model_class(shape)(make_config(shape)).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or name.endswith(("A_log", "dt_bias")):
            parameter.copy_(_drawn(parameter, name, seed))
    return model


@torch.no_grad()
def make_weights(shape: str, seed: int, device: str) -> dict[str, torch.Tensor]:
    """The same model's parameters by name, drawn on `device` without building it; other values than make_model's."""
    with torch.device("meta"):
        model = model_class(shape)(make_config(shape)).to(torch.bfloat16)
    weights = {}
    for name, parameter in model.named_parameters():
        draw = torch.Generator(device).manual_seed(seed * 2**32 + zlib.crc32(name.encode()))
        size = tuple(parameter.shape)
        if len(size) == 1 and not name.endswith(("A_log", "dt_bias")):
            # Norms scale by 1 + weight, but for the gated one and those of the vision tower.
            scale = name.endswith("weight") and ("linear_attn" in name or "visual" in name)
            values = torch.full(size, float(scale), device=device)
        elif isinstance(rule := _rule(name, size), tuple):
            values = torch.empty(size, device=device).uniform_(*rule, generator=draw)
        else:
            values = torch.empty(size, device=device).normal_(0.0, rule, generator=draw)
        weights[name] = values.to(torch.bfloat16).contiguous()
    return weights


def make_tokenizer() -> Any:
    """A byte-level BPE tokenizer without merges: 6 special tokens and the 256 bytes, so it round-trips any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = SPECIAL_TOKENS + sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def write_checkpoint(out_dir: Path, shape: str = "tiny", seed: int = 0, device: str = "cpu") -> Path:
    """Write config, weights and tokenizer to `out_dir`; returns it."""
    out_dir.mkdir(parents=True, exist_ok=True)
    if device == "cpu":
        make_model(shape, seed).save_pretrained(out_dir)
    else:
        from safetensors.torch import save_file

        config = make_config(shape)
        config.architectures = [model_class(shape).__name__]
        config.save_pretrained(out_dir)
        weights = {name: tensor.cpu() for name, tensor in make_weights(shape, seed, device).items()}
        save_file(weights, out_dir / "model.safetensors", metadata={"format": "pt"})
    make_tokenizer().save_pretrained(out_dir)
    return out_dir


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path, help="directory to write to; made if missing")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights (default 0)")
    parser.add_argument("--device", default="cpu", help="where the weights are drawn")
    arguments = parser.parse_args()
    # transformers' model code imports fla where there is one, and with it TileLang: longer than all the rest takes.
    sys.modules["fla"] = None  # type: ignore[assignment]
    write_checkpoint(arguments.out_dir, arguments.shape, arguments.seed, arguments.device)


if __name__ == "__main__":
    main()
