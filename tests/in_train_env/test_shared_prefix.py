"""A batch that passes its common beginning once, against the same batch passed whole: outputs, loss and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from training.shared_prefix import packed, share

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
KINDS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


def models(kind: str) -> tuple[Any, Any]:
    """The same random model twice; the second shares beginnings."""
    configuration, causal = KINDS[kind]
    torch.manual_seed(0)
    plain = causal(configuration(**SIZES, attn_implementation="sdpa"))
    sharing = causal(plain.config)
    sharing.load_state_dict(plain.state_dict())
    assert share(sharing.get_decoder())
    assert share(sharing.get_decoder()), "twice is once"
    return plain, sharing


def batch(rows: list[list[int]], left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    ids, attention = torch.zeros(2, len(rows), width, dtype=torch.long)
    for number, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        ids[number, place] = torch.tensor(row)
        attention[number, place] = 1
    return ids, attention


begin = [1 + place % 40 for place in range(20)]
tails = st.lists(st.lists(st.integers(1, 49), max_size=9), min_size=1, max_size=5)


@settings(deadline=None, max_examples=60)
@given(tails, st.booleans())
def test_every_token_sees_what_it_saw_before_and_nothing_else(ends: list[list[int]], left: bool) -> None:
    rows = [begin + end for end in ends]
    ids, attention = batch(rows, left)
    found = packed(ids, attention)
    if found is None:
        assert len(rows) == 1
        return
    assert found.tokens.shape[1] < sum(map(len, rows))
    for number, row in enumerate(rows):
        places = found.places[number][attention[number].bool()]
        assert found.tokens[0, places].tolist() == row
        assert found.positions[0, places].tolist() == list(range(len(row)))
        for length, place in enumerate(places, start=1):
            assert sorted(found.mask[0, 0, place].nonzero().flatten().tolist()) == sorted(places[:length].tolist())


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_are_the_same(kind: str, left: bool) -> None:
    plain, sharing = models(kind)
    ids, attention = batch([[*begin, 2, 3, 4, 5], [*begin, 2, 7], begin, [*begin, 9, 9, 9, 9, 9, 9]], left)
    for keep in (0, 8):
        outputs = []
        for model in (plain, sharing):
            model.zero_grad()
            logits = model(input_ids=ids, attention_mask=attention, logits_to_keep=keep).logits
            real = attention[:, -keep:].bool()
            logits[real].logsumexp(-1).square().sum().backward()
            outputs.append((logits[real].detach(), [parameter.grad.clone() for parameter in model.parameters()]))
        (theirs, slopes), (ours, our_slopes) = outputs
        assert torch.allclose(ours, theirs, atol=1e-5)
        for one, other in zip(our_slopes, slopes, strict=True):
            assert torch.allclose(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


def test_without_padding_the_mask_may_be_missing() -> None:
    plain, sharing = models("llama")
    ids, _ = batch([[*begin, 2], [*begin, 3]], left=True)
    assert torch.allclose(sharing(input_ids=ids).logits, plain(input_ids=ids).logits, atol=1e-5)


def test_what_is_no_training_pass_is_left_alone() -> None:
    plain, sharing = models("llama")
    ids, attention = batch([[*begin, 2, 3], [*begin, 4]], left=True)
    kwargs: dict[str, Any] = {"attention_mask": attention, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(sharing.generate(ids, **kwargs), plain.generate(ids, **kwargs))
    assert len(sharing(input_ids=ids, attention_mask=attention, output_hidden_states=True).hidden_states) == 4


def test_rows_with_little_in_common_or_with_gaps_are_passed_whole() -> None:
    assert packed(*batch([[1, 2, 3], [1, 2, 4]], left=False)) is None
    ids, attention = batch([begin, begin], left=False)
    attention[0, 3] = 0
    assert packed(ids, attention) is None


def test_a_decoder_with_a_window_is_not_changed() -> None:
    model = Qwen3ForCausalLM(
        Qwen3Config(
            **SIZES,
            attn_implementation="sdpa",
            layer_types=["full_attention", "sliding_attention", "full_attention"],
        )
    )
    assert not share(model.get_decoder())
