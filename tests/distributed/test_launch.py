"""A process that waits for others in vain ends at a signal, and gives up after a time."""

import signal
import subprocess
import sys
import time

WAITS = """
from aespa_pl.distributed import launch
launch.LONGEST_ARRIVAL = {longest}
from aespa_pl.run.interruption import Interruption
from torch.distributed import TCPStore
with Interruption().watching(), launch.waiting_for_others():
    print("waiting", flush=True)
    TCPStore("localhost", 0, 2, is_master=True, wait_for_workers=True)  # for the second, in C++
"""


def waiting(longest: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", WAITS.format(longest=longest)], stdout=subprocess.PIPE, text=True
    )


def test_process_that_waits_for_others_gives_up() -> None:
    with waiting(1) as process:
        assert process.wait(60) == -signal.SIGALRM


def test_process_that_waits_for_others_ends_on_a_signal() -> None:
    with waiting(60) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.5)  # until it is in the library's code
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM
