"""Make the README's picture from a finished run: where its loss is left.

pip install '.[report]'
make quickstart && python scripts/pictures.py lightning_logs/quickstart_w2 docs/pictures
"""

import argparse
from pathlib import Path

from aespa_pl.report.maps import final_loss_map, final_ratios, limits_of
from aespa_pl.report.picture import WIDE, saved, style
from aespa_pl.report.stored import read_run
from aespa_pl.run.find import find_run


def main() -> None:
    """Parse the arguments and write the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", help="folder of the run")
    parser.add_argument("folder", type=Path, help="where to write the picture")
    arguments = parser.parse_args()
    run = read_run(find_run(arguments.run, Path("lightning_logs")))
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with style():
        picture = final_loss_map(run, WIDE, limits_of([final_ratios(run)]))
    if picture.figure is None:
        raise SystemExit(f"{run.name}: {picture.caption}")
    path = arguments.folder / "final-loss.png"
    path.write_bytes(saved(picture.figure, "png"))
    print(f"{path}: {picture.caption}")


if __name__ == "__main__":
    main()
