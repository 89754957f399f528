"""A cache of latents on a CPU: it holds each key once, and its value is a part of it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from spmd_rl.errors import ConfigError
from spmd_rl.kernels import KvCache, PackedAttention, PagedAttention, contract, unproven
from spmd_rl.kernels.attention.backend import attention_backend
from spmd_rl.kernels.latents import backend
from spmd_rl.kernels.latents.sizes import LatentSizes
from spmd_rl.kernels.runtime.padding import pad_rows
from spmd_rl.model.layers.layer import CacheSpec
from spmd_rl.model.read import read_spec
from spmd_rl.rollout.kv_pages import cache_token_bytes
from tests.unit.kernels.latents.latent_case import oracle, rows_of
from tests.unit.model.test_latents import BASE, CONFIGS

CPU = torch.device("cpu")
SIZES, HEADS, PAGE_SIZE, LENGTHS = LatentSizes(20, 8), 6, 4, [9, 33, 1]
LAYER = CacheSpec(((1, sum(SIZES)),), queries_per_key=HEADS, latent_dim=SIZES.latent)


def new_cache(exponents: tuple[int, int] | None = None) -> KvCache:
    return KvCache(
        [LAYER, LAYER],
        num_pages=20,
        page_size=PAGE_SIZE,
        dtype=torch.float32,
        device=CPU,
        exponents=exponents,
    )


def packed(q: Tensor, keys: Tensor, exponents: tuple[int, int] | None = None) -> Tensor:
    attend = PackedAttention(np.array(LENGTHS), device=CPU, exponents=exponents)
    values = keys[:, None, SIZES.rotary :].clone()
    return attend(0, pad_rows(q), pad_rows(keys[:, None]), pad_rows(values))[: sum(LENGTHS)]


def paged(cache: KvCache, q: Tensor, keys: Tensor, *, forks: bool = False) -> Tensor:
    """Feed the sequences in two steps, the last token alone; with `forks`, to copies of pages."""
    table = np.random.default_rng(0).permutation(14)[: 3 + 10].reshape(1, -1)
    bounds = np.cumsum([0, *LENGTHS])
    outs = []
    for begin, end in pairwise(bounds):
        pages, spans = table, [(0, end - begin - 1), (end - begin - 1, end - begin)]
        for start, stop in spans:
            if stop == start:
                continue
            if forks and start:
                pages = (table + 7) % 20
                cache.copy_pages(table[0].tolist(), pages[0].tolist())
            place = np.arange(start, stop)
            attend = PagedAttention.chunks(
                cache,
                page_table=pages,
                starts=np.array([start]),
                lengths=np.array([stop - start]),
                slots=pages[0, place // PAGE_SIZE] * PAGE_SIZE + place % PAGE_SIZE,
            )
            own = slice(begin + start, begin + stop)
            new = pad_rows(keys[own, None])
            outs.append(attend(1, pad_rows(q[own]), new, new[..., SIZES.rotary :])[: stop - start])
    return torch.cat(outs)


@pytest.fixture
def rows() -> tuple[Tensor, Tensor]:
    q, keys, _ = rows_of(sum(LENGTHS), HEADS, SIZES, torch.float32)
    return q, keys


def test_each_key_is_held_once() -> None:
    cache = new_cache()
    assert cache.num_bytes == 2 * 20 * PAGE_SIZE * sum(SIZES) * 4
    keys, values = cache.keys_of(1)
    keys[:] = torch.randn(keys.shape)
    assert torch.equal(values, keys[..., SIZES.rotary :])


def test_the_published_sizes_take_1152_bytes_of_a_token(
    tmp_path: Path,
) -> None:
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(BASE | CONFIGS["as Moonlight"] | sizes))
    assert cache_token_bytes(read_spec(tmp_path), 2) == 3 * 1152


def test_the_contract_says_which_form_runs() -> None:
    assert contract(CPU, torch.float32)["mla"] == "absorbed-v1"


def test_attention_is_that_of_float64(rows: tuple[Tensor, Tensor]) -> None:
    q, keys = rows
    expected = oracle(q.double(), keys.double(), LENGTHS, SIZES)
    assert (packed(q, keys) - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("forks", [False, True])
def test_pages_give_the_trainers_bits(forks: bool, rows: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(paged(new_cache(), *rows, forks=forks), packed(*rows))


def test_codes_of_latents_have_the_scale_of_keys(rows: tuple[Tensor, Tensor]) -> None:
    exponents = (-6, 3)
    cache = new_cache(exponents)
    assert torch.equal(paged(cache, *rows), packed(*rows, exponents))
    assert torch.equal(packed(*rows, exponents), packed(*rows, (-6, -6)))
    assert cache.code_counts()["num_coded"] == rows[1].numel()


def test_a_gpu_takes_what_its_kernels_are_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, capability = torch.device("cuda"), [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    with pytest.raises(ConfigError, match="no GPU has run"):
        attention_backend(576, torch.bfloat16, cuda, latent_dim=512)
    monkeypatch.setattr(unproven, "are_allowed", True)
    chosen = attention_backend(576, torch.bfloat16, cuda, latent_dim=512)
    assert isinstance(chosen, backend.LatentKernels)
    assert chosen.fits_cuda_graphs(64, 16) and chosen.cache_shape(3, 64, 1, 576) == (3, 64, 1, 576)
    with pytest.raises(ConfigError, match="pages have 64 tokens"):
        chosen.cache_shape(3, 16, 1, 576)
    with pytest.raises(ConfigError, match="512 in bfloat16"):
        attention_backend(576, torch.float32, cuda, latent_dim=512)
    with pytest.raises(ConfigError, match="values of their own"):
        attention_backend(576, torch.bfloat16, cuda, 2048, latent_dim=512)
    capability[0] = (8, 0)
    with pytest.raises(ConfigError, match="Hopper"):
        attention_backend(576, torch.bfloat16, cuda, latent_dim=512)
