"""The two models that are made here rather than downloaded: SmolLM2 converted from a GGUF, and the random smoke model. Needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from configs.load import ROOT

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
HERMES_TOKENS: Final = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
VOCABULARY: Final = 4096
CORPUS: Final = (
    "LICENSE",
    "agents/tools.py",
    "agents/prompts.py",
    "datasets/sample_tasks.jsonl",
    "datasets/smoke/train.jsonl",
    "datasets/laptop/train.jsonl",
)
"""What the smoke tokenizer is trained on: the licence, the tool schemas and the training tasks; not the rest of the code, which changes daily."""


def convert_gguf(gguf: Path, target: Path) -> None:
    """Write `gguf` (SmolLM2, ChatML) as float32 safetensors with its tokenizer into `target`. Takes about 15 s and 1.5 GB."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    # The GGUF names <|im_start|> as the stop token, so generation would never stop; <|im_end|> (id 2) is what ChatML turns end in.
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.eos_token, tokenizer.pad_token = IM_END, END_OF_TEXT
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    # Loading has dequantised every tensor; without these marks transformers agrees to save them as what they are now.
    del model.hf_quantizer, model.config.quantization_config
    model.is_quantized = False
    tokenizer.model_max_length = model.config.max_position_embeddings
    set_stop_tokens(model, tokenizer)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def generate_smoke_model(target: Path, root: Path = ROOT) -> None:
    """A random Qwen3 of 1.6 M parameters and a byte-level BPE tokenizer trained on the project's own text. Takes about 5 s."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    files = [path for pattern in CORPUS for path in sorted(root.glob(pattern))]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator((path.read_text(encoding="utf-8") for path in files), trainer)
    core.add_tokens([AddedToken(token, normalized=False, special=False) for token in HERMES_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=IM_END, pad_token=END_OF_TEXT, model_max_length=4096
    )
    config = Qwen3Config(
        vocab_size=(len(tokenizer) + 63) // 64 * 64,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    set_stop_tokens(model, tokenizer)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def set_stop_tokens(model: Any, tokenizer: Any) -> None:
    """One stop and one padding token, in the model's configuration and in its generation configuration."""
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id, config.bos_token_id = (
            tokenizer.eos_token_id,
            tokenizer.pad_token_id,
            None,
        )
