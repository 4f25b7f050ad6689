"""Linear-attention geometry of served models: what a slot's size depends on. Sizes are those of the whole model."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ConfigError, check_int
from .layout import StateLayout


@dataclass(frozen=True)
class ModelPreset:
    """Linear-attention layers of one model: head counts before tensor parallelism, head size 128, conv width 4."""

    name: str
    kind: str
    layers: int
    key_heads: int
    value_heads: int
    key_dim: int = 128
    value_dim: int = 128
    conv_width: int = 4

    def rank_heads(self, tp: int) -> tuple[int, int]:
        """Key and value heads of one rank. ConfigError if `tp` does not divide them."""
        check_int("tp", tp, 1)
        if self.key_heads % tp or self.value_heads % tp:
            raise ConfigError("tp", tp, f"a divisor of {self.key_heads} key and {self.value_heads} value heads")
        return self.key_heads // tp, self.value_heads // tp

    def rank_channels(self, tp: int) -> int:
        """Conv channels of one rank: its q, k and v heads side by side."""
        key_heads, value_heads = self.rank_heads(tp)
        return 2 * key_heads * self.key_dim + value_heads * self.value_dim

    def layout(self, tp: int = 1, *, state_dtype: str = "float32", conv_dtype: str = "bfloat16") -> StateLayout:
        """The slot of one rank."""
        _, value_heads = self.rank_heads(tp)
        return StateLayout.uniform(
            self.layers,
            channels=self.rank_channels(tp),
            value_heads=value_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            conv_width=self.conv_width,
            conv_dtype=conv_dtype,
            state_dtype=state_dtype,
            kind=self.kind,
        )


_ROWS = (
    ("qwen3.5-0.8b", "gdn", 18, 16, 16),
    ("qwen3.5-2b", "gdn", 18, 16, 16),
    ("qwen3.5-4b", "gdn", 24, 16, 32),
    ("qwen3.5-9b", "gdn", 24, 16, 32),
    ("qwen3.5-27b", "gdn", 48, 16, 48),
    ("qwen3.5-35b-a3b", "gdn", 30, 16, 32),
    ("qwen3.5-122b-a10b", "gdn", 36, 16, 64),
    ("qwen3.5-397b-a17b", "gdn", 45, 16, 64),
    ("qwen3.6-27b", "gdn", 48, 16, 48),
    ("qwen3.6-35b-a3b", "gdn", 30, 16, 32),
    ("qwen3-next-80b-a3b", "gdn", 36, 16, 32),
    ("qwen3.8-flash-next", "gdn", 36, 16, 48),
    ("lara-4-mini", "gdn", 14, 8, 16),
    ("glm-5.3-flash", "kda", 34, 64, 64),
    ("kimi-linear-48b", "kda", 20, 32, 32),
    ("kimi-k3", "kda", 69, 96, 96),
    ("ling-3.0-flash", "kda", 35, 32, 32),
)
PRESETS = {row[0]: ModelPreset(*row) for row in _ROWS}
ALIASES = {"kimi-linear": "kimi-linear-48b", "qwen3-next": "qwen3-next-80b-a3b"}


def preset(name: str) -> ModelPreset:
    """The preset of a model by its name, case ignored. ConfigError names the known ones."""
    key = name.lower()
    key = ALIASES.get(key, key)
    if key not in PRESETS:
        raise ConfigError("model", name, ", ".join(sorted([*PRESETS, *ALIASES])))
    return PRESETS[key]
