"""The simulated device refuses and counts what a real one would refuse and do."""

import pytest
import torch

from tests.device.simulated import simulated
from tests.device.tally import counting


def test_tensors_of_two_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated(monkeypatch) as device:
        here, there = torch.randn(3, 4), torch.randn(3, 4, device=device)
        for wrong in (
            lambda: here + there,
            lambda: there.add_(here),
            lambda: torch.cat([there, here]),
            lambda: there @ here.T,
            lambda: torch.mm(there, there.T, out=torch.empty(3, 3)),
        ):
            with pytest.raises(RuntimeError, match="tensors of two devices"):
                wrong()  # type: ignore[no-untyped-call]
        assert (there * torch.tensor(2.0)).device == device  # a number goes with the kernel


def test_kernels_and_their_bytes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated(monkeypatch) as device:
        A, B = torch.randn(8, 4, device=device), torch.randn(4, 2, device=device)
        for call, kernels, numbers in (
            (lambda: A + A, 1, 3 * 32),  # two reads, one write
            (lambda: A.mul_(2), 1, 2 * 32),
            (lambda: A.T.reshape(8, 4)[:2].unsqueeze(0), 1, 2 * 32),  # the copy alone
            (lambda: A.view(4, 8)[1:].T, 0, 0),
            (lambda: A + A[:, :1].expand(8, 4), 1, 32 + 8 + 32),  # read once, however often it is used
            (lambda: A @ B, 1, 32 + 8 + 16),
            (A.zero_, 1, 32),
            (lambda: A.softmax(-1).sum(), 2, 2 * 32 + 32 + 1),
        ):
            with counting() as found:
                call()  # type: ignore[no-untyped-call]
            assert (found.count, found.bytes, found.waits.total()) == (kernels, 4 * numbers, 0)


def test_what_the_host_waits_for_is_counted_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated(monkeypatch) as device:
        A = torch.arange(6.0, device=device)
        for call in (
            lambda: float(A.sum()),
            A.nonzero,
            lambda: A[A > 2],
            A.tolist,
            A.cpu,
            lambda: torch.ones(2).to(device),
            lambda: torch.equal(A, A),
            lambda: A[torch.tensor([1, 2])],  # the index is copied
            lambda: torch.tensor([1.0, 2.0], device=device),
        ):
            with counting() as found:
                call()
            assert found.waits.total() == 1
        with counting() as found:
            torch.where(A > 2, A, 0).masked_fill_(A > 3, 1)[2:].argmax()
            A[torch.arange(3, device=device)].to(torch.float16)
        assert not found.waits
