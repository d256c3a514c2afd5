"""LoRA on CPUs, by adapter: what vLLM means to add, and nothing where there is no adapter."""

from __future__ import annotations

import pytest
import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from serve_app.engine import on_cpu

PLACES, RANK, WIDTH, SLICES = 3, 4, 6, (5, 2)


@pytest.fixture
def wrapper(monkeypatch):
    monkeypatch.setattr(torch, "Generator", torch.Generator)  # as it was, afterwards
    kept = PunicaWrapperCPU.add_lora_linear, PunicaWrapperCPU.update_metadata
    on_cpu.mend()
    on_cpu.mend()
    yield PunicaWrapperCPU(16, 4, "cpu")
    PunicaWrapperCPU.add_lora_linear, PunicaWrapperCPU.update_metadata = kept


def told(wrapper, places: list[int]) -> None:
    """As vLLM's own metadata come: a place for each token."""
    wrapper._token_lora_indices[: len(places)] = torch.tensor(places)
    wrapper.indices_len[0] = len(places)
    vars(wrapper).pop(on_cpu.GROUPS, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("places", [[0, 0, 0, 0], [-1, -1, -1, -1], [2, -1, 0, 2], [1, -1, -1, 1]])
def test_each_token_gets_what_its_adapter_adds_and_the_base_nothing(wrapper, places, dtype):
    made = torch.Generator().manual_seed(1)
    x = torch.randn(len(places), WIDTH, generator=made).to(dtype)
    a = tuple(torch.randn(PLACES, 1, RANK, WIDTH, generator=made).to(dtype) for _ in SLICES)
    b = tuple(torch.randn(PLACES, 1, size, RANK, generator=made).to(dtype) for size in SLICES)
    y = torch.randn(len(places), sum(SLICES), generator=made).to(dtype)
    wanted = y.clone()
    for row, place in enumerate(places):
        if place >= 0:
            parts = [0.5 * (x[row].float() @ a[at][place, 0].float().T) @ b[at][place, 0].float().T for at in range(len(SLICES))]
            wanted[row] += torch.cat(parts).to(dtype)
    told(wrapper, places)
    wrapper.add_lora_linear(y, x, a, b, 0.5, SLICES)
    loose = 0.1 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(y, wanted, rtol=loose, atol=loose)
    assert all(torch.equal(y[row], wanted[row]) for row, place in enumerate(places) if place < 0)


def test_a_seeded_generator_can_be_turned_back_as_vllm_does_in_the_middle_of_a_prompt(wrapper):
    generator = torch.Generator(device="cpu").manual_seed(7)
    drawn = torch.rand(3, generator=generator)
    generator.set_offset(generator.get_offset() - 4)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(7)))
