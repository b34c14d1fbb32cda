"""Start the command line, as ``aespa-pl`` or ``python -m aespa_pl``."""

import os
import sys

from aespa_pl.processors import threads


def main() -> None:
    """Run the command line; Ctrl-C while the libraries are being imported ends quietly as well."""
    if sys.platform == "win32":
        sys.exit("aespa-pl runs on Linux and macOS: on Windows use the Windows Subsystem for Linux")
    set_threads()
    try:
        from aespa_pl import cli  # noqa: PLC0415  (so that Ctrl-C is caught here)
    except KeyboardInterrupt:
        sys.exit(130)
    cli.main()


def set_threads() -> None:
    """Set what OpenMP and oneDNN read when torch is imported, unless the environment says otherwise.

    A thread that waits for the others spins for some microseconds, which bridges the gap between two
    operations, and then sleeps: one that spins on takes the core of a thread that it waits for where other
    processes run (benchmarks/busy_machine.py).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ.setdefault("GOMP_SPINCOUNT", "1500")
    if (quota := threads()) is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(quota))
    # a program is kept for each shape of a product, and experts see another number of tokens each time
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")


if __name__ == "__main__":
    main()
