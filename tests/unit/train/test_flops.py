"""The arithmetic of a step against a count of its products, and what is reported of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from spmd_rl.model.lora import LoraConfig
from spmd_rl.train.cost import flops
from tests.specs import attention_of, with_layers


def _counted(spec, lengths: list[int], num_scored: int) -> int:
    """Products of a dense forward and backward pass, attention's in full."""

    def leaf(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, requires_grad=True)

    num_tokens, attention = sum(lengths), attention_of(spec)
    with FlopCounterMode(display=False) as counter:
        for name, shape in spec.parameter_shapes().items():
            if len(shape) == 2 and "embed_tokens" not in name and "lm_head" not in name:
                F.linear(leaf(num_tokens, shape[1]), leaf(*shape)).sum().backward()
        F.linear(
            leaf(num_scored, spec.hidden_size), leaf(spec.vocab_size, spec.hidden_size)
        ).sum().backward()
        for length in lengths * spec.num_layers:
            q, k, v = (leaf(attention.num_heads, length, attention.head_dim) for _ in range(3))
            ((q @ k.transpose(1, 2)) @ v).sum().backward()
    return counter.get_total_flops()


def test_counted_products_agree(new_trainer) -> None:
    spec, lengths = new_trainer().backend.scorer.model.spec, [40, 7, 23]
    triangles = (
        6 * sum(length**2 for length in lengths) * attention_of(spec).width * spec.num_layers
    )
    found = flops.train_flops(spec, np.array(lengths, np.int32), 11)
    assert found + triangles == _counted(spec, lengths, 11)


def test_weights_beside_adapters_have_no_gradient(new_trainer) -> None:
    """A pass multiplies the base twice and not three times, and the adapters thrice."""
    lora, lengths = LoraConfig(rank=4), np.array([40, 7, 23], np.int32)
    model = new_trainer(lora=lora).backend.scorer.model
    spec = replace(model.spec, vocab_size=0, hidden_size=0)
    without_products = with_layers(spec, hidden_size=0)
    attention = flops.train_flops(without_products, lengths, 11)
    base = flops.train_flops(model.spec, lengths, 11) - attention
    adapters = 6 * 70 * sum(one.numel() for layer in model.adapters() for one in layer.parameters())
    assert flops.train_flops(model.spec, lengths, 11, lora) == attention + base * 2 / 3 + adapters


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("NVIDIA H200", "bfloat16", 989e12),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA H200", "float32", None),
        ("NVIDIA GeForce", "bfloat16", None),
    ],
)
def test_peaks_of_known_devices(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, expected: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert flops.peak_flops(torch.device("cuda"), dtype) == expected
    assert flops.peak_flops(torch.device("cpu"), dtype) is None
