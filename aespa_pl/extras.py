"""Say how to install the libraries that only some commands need."""

from importlib.metadata import PackageNotFoundError, requires


def install_command(extra: str) -> str:
    """Return the command that installs the libraries of an extra of ``pyproject.toml``.

    It names the libraries and not this package, which the user may have from a folder or a repository.
    """
    try:
        lines = requires("aespa-pl") or []
    except PackageNotFoundError:  # run from its sources, without being installed
        return f"pip install '.[{extra}]' in the folder of its sources"
    wanted = [line.partition(";")[0].strip() for line in lines if f'extra == "{extra}"' in line]
    return "pip install " + " ".join(f"'{name}'" for name in wanted)
