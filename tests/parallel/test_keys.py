"""Models of transformers that keep no keys of their forward, against the same models that keep them: in one
process, in all ways to call them.
"""

import copy
import inspect

import pytest
import torch
import transformers as hf

from pycomm.parallel.models.keys import forget_keys

SIZES = {"vocab_size": 19, "hidden_size": 8, "intermediate_size": 9, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16,
         "initializer_range": 0.3}  # fmt: skip
IDS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
PACKED = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3]])


def llama(**options):
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, **options)).eval()


def crossed():
    """Its cache has keys of an encoder too."""
    torch.manual_seed(0)
    sizes = {"n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 19}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, add_cross_attention=True)).eval()


def forgetful(make, **options):
    model = make(**options)
    forget_keys(model)
    return model


CALLS = {
    "nothing": {},
    "yes": {"use_cache": True},
    "no": {"use_cache": False},
    "packed": {"position_ids": PACKED},
    "packed, no keys": {"position_ids": PACKED, "use_cache": False},
    "a mask": {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])},
    "hidden states": {"output_hidden_states": True},
}


def test_a_forward_gives_what_it_gave_but_the_keys():
    own, model = llama(), forgetful(llama)
    for name, call in [*CALLS.items(), *CALLS.items()]:
        right, found = own(IDS, **call), model(IDS, **call)
        assert torch.equal(found.logits, right.logits), name
        assert set(right) - set(found) <= {"past_key_values"} and found.past_key_values is None, name
        as_tuple = model(IDS, return_dict=False, **call)
        assert len(as_tuple) == len(found) and torch.equal(as_tuple[0], right.logits), name


def test_arguments_by_place():
    torch.manual_seed(0)
    own = hf.LlamaModel(hf.LlamaConfig(**SIZES)).eval()
    model, mask = copy.deepcopy(own), torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    forget_keys(model)
    assert len(hooks(model)) and sum(hooks(model)) == 2
    for given in ((IDS,), (IDS, mask), (IDS, None, PACKED)):
        right, found = own(*given), model(*given)
        assert torch.equal(found.last_hidden_state, right.last_hidden_state)
        assert right.past_key_values is not None and found.past_key_values is None


def test_keys_that_are_given_are_used():
    own, model = llama(), forgetful(llama)
    whole = own(IDS).logits
    with torch.no_grad():
        cache = own(IDS[:, :4], use_cache=True).past_key_values
    for each in (own, model):
        given = copy.deepcopy(cache)
        out = each(IDS[:, 4:], past_key_values=given, use_cache=True)
        torch.testing.assert_close(out.logits, whole[:, 4:])
        assert given.get_seq_length() == 6  # and extended, as in one process


def hooks(model):
    return [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]


def test_a_second_call_changes_nothing():
    model = forgetful(llama)
    count = hooks(model)
    forget_keys(model)
    assert count == hooks(model) and model.config.use_cache is True and sum(count) == 2
    assert not any(hooks(forgetful(llama, use_cache=False)))


def test_recomputation_makes_no_cache_as_before():
    own, model = llama().train(), forgetful(llama).train()
    for each in (own, model):
        each.gradient_checkpointing_enable()
    right, found = own(IDS, labels=IDS), model(IDS, labels=IDS)
    assert right.loss == found.loss and found.past_key_values is None
    for each in (right, found):
        each.loss.backward()
    for one, other in zip(own.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_where_the_cache_is_made_otherwise_it_is_left_out():
    """And documents that are packed are refused, as one process would keep them together."""
    model = forgetful(crossed)
    assert model.config.use_cache is False and model.transformer.config.use_cache is False
    assert "position_ids" in inspect.signature(hf.GPT2Model.forward).parameters
    assert torch.equal(model(IDS).logits, crossed()(IDS, use_cache=False).logits)
    with pytest.raises(ValueError, match="position_ids of GPT2.* begin anew.*config.use_cache = False"):
        model(IDS, position_ids=PACKED)
    rising = torch.arange(6).expand(2, -1)
    for options in (
        {"position_ids": rising},
        {"position_ids": rising + 3},
        {"position_ids": PACKED, "use_cache": False},
        {"position_ids": PACKED, "attention_mask": torch.ones_like(IDS)},
    ):
        assert model(IDS, **options).past_key_values is None
