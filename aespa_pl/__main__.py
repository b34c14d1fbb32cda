"""Start the command line, as ``aespa-pl`` or ``python -m aespa_pl``."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C while the libraries are being imported ends quietly as well."""
    try:
        from aespa_pl import cli  # noqa: PLC0415  (so that Ctrl-C is caught here)
    except KeyboardInterrupt:
        sys.exit(130)
    cli.main()


if __name__ == "__main__":
    main()
