"""A LoRA adapter that changes what the model says, without training one: `python make_adapter.py MODEL OUT`.

Its B matrices are random, not zero, and it brings a dropout, as an adapter from SFT does.
"""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
config = LoraConfig(r=8, lora_alpha=32, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
tuned = get_peft_model(model, config)
chance = torch.Generator().manual_seed(7)
for name, parameter in tuned.named_parameters():
    if "lora_B" in name:
        parameter.data = torch.randn(parameter.shape, generator=chance) * 0.02
tuned.save_pretrained(sys.argv[2])
