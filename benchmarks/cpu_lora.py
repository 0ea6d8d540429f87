"""Generation with an adapter in vLLM on CPU: our matrix products (training/cpu_lora.py) against vLLM's own path, and against no adapter at all.

`.venv-train/bin/python -m benchmarks.cpu_lora --adapter output/…/checkpoint-N` loads the laptop profile's model once and takes turns: the same
prompts, greedily, so many tokens each. It prints seconds of each turn and the ratios of their medians; the tokens of both paths have to be the same.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from statistics import median
from typing import Any, Final

from configs.load import load_profile
from training.environment import environment

OURS: Final = ("update_metadata", "_apply_shrink", "_apply_expand", "add_lora_logits")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--adapter", type=Path, required=True, help="checkpoint folder of a LoRA of that model")
    options.add_argument("--sequences", type=int, default=16, help="sequences decoded at once")
    options.add_argument("--tokens", type=int, default=32, help="tokens of each")
    options.add_argument("--turns", type=int, default=3, help="measurements of each way")
    asked = options.parse_args()
    profile = load_profile("laptop", environ={})
    os.environ.update(environment("infer", profile) | {"VLLM_PLUGINS": "none"})

    from vllm import LLM, SamplingParams
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU as Wrapper
    from vllm.lora.request import LoRARequest

    from training.cpu_lora import matrix_products

    theirs = {name: getattr(Wrapper, name) for name in OURS}
    matrix_products()
    ours = {name: getattr(Wrapper, name) for name in OURS}
    engine = LLM(
        str(profile.model_path),
        dtype="float32",
        max_model_len=profile.rollout.max_model_len,
        max_num_seqs=asked.sequences,
        enforce_eager=True,
        enable_lora=True,
        max_lora_rank=profile.lora.rank,
    )
    adapter = LoRARequest("adapter", 1, str(asked.adapter))
    how = SamplingParams(temperature=0, max_tokens=asked.tokens, ignore_eos=True)
    prompts = [f"Task {number}: create the file {number}.py that prints {number}." for number in range(asked.sequences)]

    def turn(methods: dict[str, Any], lora: Any) -> tuple[float, list[list[int]]]:
        for name, method in methods.items():
            setattr(Wrapper, name, method)
        started = time.perf_counter()
        answers = engine.generate(prompts, how, lora_request=lora, use_tqdm=False)
        return time.perf_counter() - started, [list(answer.outputs[0].token_ids) for answer in answers]

    ways = {"ours": (ours, adapter), "vllm": (theirs, adapter), "none": (ours, None)}
    for methods, lora in ways.values():
        turn(methods, lora)  # loads the adapter and fills the prefix cache
    taken: dict[str, list[float]] = {name: [] for name in ways}
    said: dict[str, list[list[int]]] = {}
    for _ in range(asked.turns):
        for name, (methods, lora) in ways.items():
            seconds, said[name] = turn(methods, lora)
            taken[name].append(seconds)
    for name, turns in taken.items():
        print(f"{name}: {', '.join(f'{value:.2f}' for value in turns)} s for {asked.sequences} x {asked.tokens} tokens")
    middle = {name: median(turns) for name, turns in taken.items()}
    print(f"vllm / ours: {middle['vllm'] / middle['ours']:.2f}; ours / none: {middle['ours'] / middle['none']:.2f}")
    print(f"same tokens: {said['ours'] == said['vllm']}")


if __name__ == "__main__":
    main()
