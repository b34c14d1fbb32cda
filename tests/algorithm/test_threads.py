"""Small operations use one thread, and the others come back."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from aespa_pl.algorithm import descent
from aespa_pl.algorithm.grid import min_max_grid
from aespa_pl.algorithm.objectives import reconstruction_loss
from aespa_pl.algorithm.quantizer import GridFormat, quantize
from aespa_pl.algorithm.workspace import one_thread


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("where", "expected"), [(True, 1), (False, 2)])
def test_one_thread_where_it_is_wanted(where: bool, expected: int) -> None:
    with one_thread(where=where):
        assert torch.get_num_threads() == expected
    assert torch.get_num_threads() == 2


def test_the_threads_come_back_after_an_error() -> None:
    with pytest.raises(KeyError), one_thread(where=True):
        raise KeyError
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("coupled", "most", "expected"), [(True, 2**20, 1), (True, 1, 2), (False, 2**20, 2)])
def test_a_descent_of_small_coupled_tiles_uses_one_thread(
    monkeypatch: pytest.MonkeyPatch, coupled: bool, most: int, expected: int
) -> None:
    seen = []

    def noted(*arguments: Any) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return reconstruction_loss(*arguments)

    monkeypatch.setattr(descent, "reconstruction_loss", noted)
    monkeypatch.setattr(descent, "ONE_THREAD", most)
    W, H = torch.randn(1, 4, 8), torch.eye(8)[None]
    grid = min_max_grid(W, torch.ones(8), GridFormat(2, symmetric=False, group_size=None))
    G = torch.eye(4)[None] if coupled else None
    descent.descend(quantize(W, grid), W, grid, H, G, passes=1)
    assert seen == [expected]
    assert torch.get_num_threads() == 2


GRADIENTS = """
from aespa_pl.algorithm.workspace import keep_threads, one_thread
import torch
keep_threads()
generator = torch.Generator().manual_seed(0)
Q, K, V, weights = (torch.randn(1, 4, 256, 32, generator=generator) for _ in range(4))

def gradients():
    inputs = [X.clone().requires_grad_() for X in (Q, K, V)]
    output = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
    return torch.autograd.grad((output * weights).sum(), inputs)

before = gradients()
with one_thread(where=True):
    pass
print(all(map(torch.equal, before, gradients())))
"""


def test_gradients_have_the_same_bits_before_and_after_a_change_of_threads() -> None:
    """It takes a new process: in this one the number of threads has been set already."""
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", GRADIENTS], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"
