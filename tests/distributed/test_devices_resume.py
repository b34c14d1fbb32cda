"""A run of several processes goes on with another number of them, from the checkpoint of one."""

import shutil
import signal
from typing import Any

import torch
from safetensors.torch import load_file

from tests.distributed.bench import LAST, TWO, Bench, Whole
from tests.walks import BLOCKS

ONCE = 21
"""A number of iterations of which a block has only one multiple."""


def test_checkpoint_is_that_of_one_process(bench: Bench) -> None:
    """A checkpoint has the whole block, whichever processes have learned it, up to the order of sums."""
    files, checkpoint = [], f"checkpoints/block_000/step_{ONCE}.ckpt"
    for name, processes in (("stopped_one", 1), ("stopped_two", 2)):
        once = f"--output.checkpoint_iterations={ONCE}"
        outcome = bench.fit(name, once, processes=processes, number=signal.SIGKILL, when=checkpoint)
        assert outcome.status == -signal.SIGKILL
        (file,) = bench.run(name).glob(checkpoint)
        files.append(file)
    one, two = (torch.load(file, weights_only=True) for file in files)
    assert one["global_step"] == two["global_step"]
    assert_alike(one["state_dict"], two["state_dict"])
    assert_alike(one["optimizer_states"], two["optimizer_states"])
    assert one.keys() == two.keys()
    assert one["loops"].keys() == two["loops"].keys()


def assert_alike(one: Any, two: Any) -> None:
    """Check that two nested containers are equal, tensors with a tolerance."""
    assert type(one) is type(two)
    if isinstance(one, torch.Tensor):
        assert one.is_contiguous() == two.is_contiguous()
        torch.testing.assert_close(two, one, rtol=1e-3, atol=1e-4)
    elif isinstance(one, dict):
        assert list(one) == list(two)
        for key, value in one.items():
            assert_alike(value, two[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(two)
        for x, y in zip(one, two, strict=True):
            assert_alike(x, y)
    else:
        assert one == two


def test_run_of_two_that_was_stopped_goes_on_with_one(bench: Bench, whole: Whole) -> None:
    """The signal comes to one process, which is the second of two."""
    name, when = "from_two_to_one", "checkpoints/block_001/*.ckpt"
    stopped = bench.fit(name, processes=2, number=signal.SIGTERM, to=1, when=when)
    assert stopped.status == 143, "\n".join(stopped.texts)
    lines = stopped.text.splitlines()
    assert lines[-1].startswith("aespa-pl: stopped by SIGTERM; continue with: aespa-pl fit")
    assert "words.txt is a calibration text as well" in lines[0]
    first = [line.split()[0] for line in lines[1:-1]]
    assert first == ["method", "run", "2", "54", "block", "about"]
    assert stopped.texts[1:] == [""]
    assert bench.journal(name)["checkpoint"]["file"].endswith("-interrupted.ckpt")
    used = bench.journal(name)["checkpoint"]["block"]
    assert used == 1
    outcome = bench.fit(name, *LAST)
    assert outcome.status == 0, "\n".join(outcome.texts)
    assert f"1 of {BLOCKS} blocks are complete already" in outcome.text
    bench.check(name, like=whole())


TUNED = (
    "--data.calibration.seed=1",
    "--quantization.method=aespa-tuned",
    "--data.batch_size=2",
    "--output.checkpoint_iterations=1",
)


def check_same_blocks(bench: Bench, *names: str) -> None:
    for index in range(BLOCKS):
        file = f"blocks/block_{index:03}.safetensors"
        found, expected = (load_file(bench.run(name) / file) for name in names)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_two_tune_together_and_go_on_bit_for_bit(bench: Bench) -> None:
    whole = bench.fit("tuned", *TUNED, processes=2)
    assert whole.status == 0, "\n".join(whole.texts)
    assert whole.texts[1:] == [""]
    tuning = [record["tuning"] for record in bench.journal("tuned")["blocks"].values()]
    assert any(found["error"] < found["start_error"] for found in tuning)
    when = "checkpoints/block_001/tuning/step_[2-9]*.ckpt"  # the journal has the one before
    killed = bench.fit("tuned_killed", *TUNED, processes=2, number=signal.SIGKILL, when=when)
    assert killed.status == -signal.SIGKILL
    used = bench.journal("tuned_killed")["checkpoint"]
    assert used["block"] == 1
    outcome = bench.fit("tuned_killed", *TUNED, *LAST, processes=2)
    assert outcome.status == 0, "\n".join(outcome.texts)
    check_same_blocks(bench, "tuned_killed", "tuned")
    ends = [bench.journal(name)["tuned"] for name in ("tuned_killed", "tuned")]
    assert all(end.pop("seconds")["tuning the model"] > 0 for end in ends)
    assert ends[0] == ends[1]


ON_DISK = (
    "--quantization.method=rtn",
    "--quantization.tuning.model.enabled=true",
    "--quantization.tuning.model.blocks=disk",
    "--quantization.tuning.model.integer_rate=0.2",
    "--quantization.tuning.model.epochs=4",
    "--data.batch_size=2",
    "--output.checkpoint_iterations=1",
)


def test_two_move_integers_on_disk_together_and_go_on_bit_for_bit(bench: Bench) -> None:
    whole = bench.fit("moved", *ON_DISK, processes=2)
    assert whole.status == 0, "\n".join(whole.texts)
    assert whole.texts[1:] == [""]
    end = bench.journal("moved")["tuned"]
    assert end["error"] < end["start_error"]
    assert end["changed"] > 0
    killed = bench.fit("moved_killed", *ON_DISK, processes=2, number=signal.SIGKILL, when="moved/step_3/*")
    assert killed.status == -signal.SIGKILL
    shutil.copytree(bench.run("moved_killed").parent, bench.run("moved_again").parent)
    outcome = bench.fit("moved_killed", *ON_DISK, *LAST, processes=2)
    assert outcome.status == 0, "\n".join(outcome.texts)
    check_same_blocks(bench, "moved_killed", "moved")
    # each process has other segments in batches of one, so the tuning begins again
    outcome = bench.fit("moved_again", *ON_DISK, "--data.batch_size=1", *LAST, processes=2)
    assert outcome.status == 0, "\n".join(outcome.texts)
    again = bench.journal("moved_killed")["tuned"]
    assert (again["error"], again["changed"]) == (end["error"], end["changed"])
    assert not (bench.run("moved") / "moved").exists()


def test_killed_run_of_one_goes_on_with_torchrun(bench: Bench, whole: Whole) -> None:
    killed = bench.fit("torchrun", number=signal.SIGKILL, when="checkpoints/block_001/*.ckpt")
    assert killed.status == -signal.SIGKILL
    arguments = bench.arguments("torchrun", *TWO, *LAST)
    outcome = bench.forks.run(arguments, target="tests.peers:under_torchrun")
    assert outcome.status == 0, outcome.text
    assert f"1 of {BLOCKS} blocks are complete already" in outcome.text
    bench.check("torchrun", like=whole())
