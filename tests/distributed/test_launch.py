"""Processes that wait for others in vain say so, stop at a signal, and give up."""

import re
import signal
import subprocess
import sys
import time

WAITS = """
import time
from aespa_pl.distributed import launch
launch.SPEAK_SECONDS, launch.LONGEST_ARRIVAL = {speak}, {longest}
from aespa_pl.run.interruption import Interruption
from torch.distributed import TCPStore
with Interruption().watching(), launch.waiting_for(2):
    print("waiting", flush=True)
    TCPStore("localhost", 0, 2, is_master=True, wait_for_workers=True)  # for the second, in C++
"""


def test_process_that_waits_for_others_says_so_and_gives_up() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WAITS.format(speak=0.1, longest=0.5)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    first, last = done.stderr.splitlines()
    assert re.search(r"waiting for 2 processes to meet.*trainer\.num_nodes; gives up after", first)
    assert "gave up waiting for 2 processes" in last


def test_process_that_waits_for_others_ends_on_a_signal() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAITS.format(speak=30, longest=60)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.5)  # until it is in the library's code
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM; no run had begun" in err
