"""``python -m aespa_pl`` is ``aespa-pl``."""

from aespa_pl.cli import main

if __name__ == "__main__":
    main()
