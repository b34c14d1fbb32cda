"""A key of the command line that would do nothing is refused, or said to do nothing."""

import re

import pytest

from tests.cli.commands import CommandLine, Done


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--quantization.bits", 4),
            r"quantization\.bits is 4, but the run has 2 \(.*\): choose another run",
        ),
        (("--quantization", "{bits: 4}"), r"quantization\.bits is 4, but the run has 2"),
        (
            ("--quantization.bits_of", "{q_proj: 3}", "--quantization.method", "rtn"),
            r"bits_of is {'q_proj': 3}, but the run has {}; quantization\.method is rtn, but the run has",
        ),
    ],
)
def test_another_quantization_than_that_of_the_run_is_not_measured(
    aespa: CommandLine, unmeasured: Done, words: tuple[object, ...], message: str
) -> None:
    run = unmeasured.copied()
    status, out, err = aespa("test", "--ckpt_path", run, *words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert re.search(message, err)
