"""A training pass on CPU with common beginnings passed once (training/shared_prefix.py) against the same batch passed whole.

`.venv-train/bin/python -m benchmarks.shared_prefix` takes the laptop profile's model with a new LoRA, and random tokens in the lengths of the laptop tasks:
GRPO's rollouts share a prompt of 275 tokens, SFT's rows the 235 of system prompt and tools; each has 60 to 180 of its own. It takes turns, forward and
backward over all logits of its own part, and prints the ratio of the medians. Losses have to agree.
"""

from __future__ import annotations

import argparse
import os
import time
from statistics import median
from typing import Any, Final

from configs.load import load_profile
from training.environment import environment

BEGINNINGS: Final = {"grpo": 275, "sft": 235}
OWN: Final = (60, 180)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", type=int, nargs="+", default=[2, 4, 8], help="rows of a batch")
    options.add_argument("--turns", type=int, default=3, help="measurements of each way")
    asked = options.parse_args()
    profile = load_profile("laptop", environ={})
    os.environ.update(environment("sft", profile))

    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from training.shared_prefix import share

    base = AutoModelForCausalLM.from_pretrained(profile.model_path, dtype=torch.float32, attn_implementation="sdpa")
    model = get_peft_model(
        base, LoraConfig(r=profile.lora.rank, lora_alpha=profile.lora.alpha, target_modules="all-linear")
    )
    decoder = base.get_decoder()
    whole = decoder.forward
    assert share(decoder)
    ways = {"whole": whole, "once": decoder.forward}

    def turn(way: str, ids: Any, attention: Any) -> tuple[float, float]:
        decoder.forward = ways[way]
        began = time.perf_counter()
        logits = model(input_ids=ids, attention_mask=attention, use_cache=False, logits_to_keep=OWN[1] + 1).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), ids[:, -OWN[1] :].masked_fill(attention[:, -OWN[1] :] == 0, -100).flatten()
        )
        loss.backward()
        return time.perf_counter() - began, float(loss.detach())

    for kind, beginning in BEGINNINGS.items():
        for rows in asked.rows:
            chance = torch.Generator().manual_seed(rows)
            own = torch.randint(*OWN, (rows,), generator=chance)
            width = beginning + OWN[1]
            ids = torch.randint(1000, 40000, (rows, width), generator=chance)
            first = width - beginning - own  # padding on the left
            attention = (torch.arange(width) >= first[:, None]).long()
            for row in range(rows):
                ids[row, first[row] : first[row] + beginning] = ids[0, first[0] : first[0] + beginning]
            taken: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(asked.turns):
                losses = []
                for way in ways:
                    seconds, loss = turn(way, ids, attention)
                    taken[way].append(seconds)
                    losses.append(loss)
                assert abs(losses[0] - losses[1]) < 1e-4, losses
            least = {way: median(seconds) for way, seconds in taken.items()}
            print(
                f"{kind}, {rows} rows: whole {least['whole']:.2f} s, once {least['once']:.2f} s, ratio {least['once'] / least['whole']:.2f}"
            )


if __name__ == "__main__":
    main()
