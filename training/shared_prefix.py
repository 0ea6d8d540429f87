"""A batch passes what its rows begin with once: on two cores half of a training's time, with the same loss and the same gradient.

Rows of a batch begin alike: with the system prompt and the tools, and in GRPO the rollouts of a prompt with all of it. A causal decoder computes the same
for such tokens in every row. So the decoder gets one row, which is the common beginning followed by what each row has of its own, with positions
that restart after the beginning and a mask that hides the rows from each other; what comes out is dealt to the places where it belongs. Everything
behind the decoder (head, loss) sees what it always sees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from training.patching import replace

LEAST: Final = 16
"""Tokens that a batch must save: fewer are not worth building a mask."""


@dataclass(frozen=True)
class Packed:
    """A batch [B, T] as one row of N tokens."""

    tokens: Any
    """[1, N]"""
    positions: Any
    """[1, N]"""
    mask: Any
    """[1, 1, N, N], True where a token (row) may look at another (column)."""
    places: Any
    """[B, T] → 0…N−1: where the output for each token of the batch is. Padding gets that of the first token, which nothing reads."""


def packed(ids: Any, attention: Any | None) -> Packed | None:
    """`ids` [B, T] with the common beginning once; `attention` [B, T] is 0 for padding, on either side. None where that saves less than `LEAST` tokens."""
    import torch

    rows, width = ids.shape
    real = torch.ones_like(ids, dtype=torch.bool) if attention is None else attention.bool()
    lengths = real.sum(1)
    starts = real.int().argmax(1)
    steps, row = torch.arange(width, device=ids.device), torch.arange(rows, device=ids.device)[:, None]
    own = steps - starts[:, None]  # position of each token in its row
    if rows < 2 or not bool((real == ((own >= 0) & (own < lengths[:, None]))).all()):
        return None  # one row, or padding between tokens
    least = int(lengths.min())
    left = torch.gather(ids, 1, (starts[:, None] + steps[:least]).clamp(max=width - 1))
    same = (left == left[:1]).all(0)
    common = int(same.int().cumprod(0).sum())
    if (rows - 1) * common < LEAST:
        return None
    kept = real & ((own >= common) | (row == 0))  # the first row's come first, beginning included
    places = kept.flatten().cumsum(0).view(rows, width) - 1
    places = torch.where(own < common, own, places).masked_fill(~real, 0)
    owner = torch.where(own < common, -1, row)[kept]
    positions = own[kept]
    mask = ((owner == -1)[None] | (owner[:, None] == owner[None])) & (positions[None] <= positions[:, None])
    return Packed(ids[kept][None], positions[None], mask[None, None], places)


def shares(decoder: Any) -> bool:
    """Whether a transformers decoder works so: attention alone mixes tokens, all of it reaches back to the first, and it takes a mask as it is."""
    config = decoder.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return config._attn_implementation == "sdpa" and kinds == {"full_attention"} and not config.is_encoder_decoder


def share(decoder: Any) -> bool:
    """Make `decoder` pass common beginnings once in training; whether it can."""
    if shares(decoder):
        replace(decoder, "forward", _forward)
        return True
    return False


def in_training() -> str:
    """Patch ms-swift's trainers to do so; called by the plugin of CPU profiles."""
    from swift.trainers.mixin import SwiftMixin

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def train(self: Any, *args: Any, **kwargs: Any) -> Any:
            done = share(self.model.get_decoder())
            print(
                f"agentexecutor patch common beginnings: {'passed once' if done else 'not with this model'}", flush=True
            )
            return original(self, *args, **kwargs)

        return train

    return replace(SwiftMixin, "train", make)


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **others: Any) -> Any:
        plain = input_ids is not None and others.get("past_key_values") is None
        plain = plain and not any(
            others.get(name) for name in ("use_cache", "output_hidden_states", "output_attentions")
        )
        plain = plain and (attention_mask is None or attention_mask.dim() == 2)
        batch = packed(input_ids, attention_mask) if plain else None
        if batch is None:
            return original(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **others)
        others["use_cache"] = False
        result = original(input_ids=batch.tokens, attention_mask=batch.mask, position_ids=batch.positions, **others)
        result.last_hidden_state = result.last_hidden_state[0][batch.places]
        return result

    return forward
