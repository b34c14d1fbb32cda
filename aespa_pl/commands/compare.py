"""Run ``aespa-pl compare``: methods, bit widths and seeds side by side, each an ordinary ``fit``."""

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentParser
from rich.console import Console
from transformers import PreTrainedConfig

import aespa_pl
from aespa_pl.commands.arguments import Arguments, Option
from aespa_pl.commands.block_types import AUTO, UNIFORM, check_format
from aespa_pl.commands.cell_process import in_process
from aespa_pl.commands.job import checked, find_model
from aespa_pl.commands.keys import refuse_other_methods
from aespa_pl.commands.output import print_table, quiet
from aespa_pl.commands.sections import AespaCLI
from aespa_pl.commands.trainer_limits import check_tuning
from aespa_pl.commands.trainers import first_trainer
from aespa_pl.data.texts import CALIBRATION_KEY, EVALUATION_KEY, find_text, is_file
from aespa_pl.errors import EndedError, UserError
from aespa_pl.extras import install_command
from aespa_pl.models.headers import read_config
from aespa_pl.models.hub import here
from aespa_pl.paths import expanded
from aespa_pl.progress import PlainConsole
from aespa_pl.report.comparison import Cell, cells_csv, figure, summary
from aespa_pl.run.find import last_run
from aespa_pl.run.folder import locked
from aespa_pl.run.interruption import Interruption
from aespa_pl.run.journal import Run, differences, model_fingerprint
from aespa_pl.settings import CompareSettings, OutputSettings, QuantizationSettings
from aespa_pl.storage.files import checksum, disk_errors, read_json, write_json, write_text, write_whole

SECTION = "compare"
CPU = torch.device("cpu")


def run(words: Sequence[str], interruption: Interruption) -> None:
    """Run all cells that are not finished, and write the results; the same command goes on after a signal."""

    def run_cell(of_cell: Sequence[str]) -> str:
        # only now: a comparison that is refused can't be continued
        interruption.how_to_continue = shlex.join(["aespa-pl", *words])
        return in_process(interruption, of_cell)

    given = Arguments.read(words[1:])
    if given.setting("trainer.fast_dev_run", "false").lower() not in ("false", "0"):
        raise UserError("trainer.fast_dev_run: a smoke test measures nothing: try it with aespa-pl fit")
    chosen, shared = _chosen(given), given.without(SECTION)
    refuse_other_methods(shared, chosen.methods)
    _refuse_other_grids(given, chosen)
    model = None
    if pretrained := shared.setting("model.pretrained", ""):
        model = here(pretrained, shared.setting("model.revision", "") or None)  # a wrong path fails once
    for key, text in _texts(shared):  # and so does that of a text
        if not (text.endswith(".safetensors") and expanded(text).is_file()):
            find_text(text, key)
    console = PlainConsole()
    if model is not None:
        for mistake in _mistakes(shared, chosen, read_config(model)):
            console.print(f"This will fail: {mistake}", soft_wrap=True)
    folder = compare(chosen, shared, run_cell, console)
    console.print(str(folder), soft_wrap=True)


def _refuse_other_grids(given: Arguments, chosen: CompareSettings) -> None:
    """Raise UserError where an option would say something of the cells' grids, and be ignored.

    A configuration may, where cells have formats: they lay them over it.
    """
    words = {o.key: o.value for o in (given.options if chosen.formats else given.given())}
    if (name := words.get("quantization.format") or UNIFORM) != UNIFORM:
        raise UserError(
            f"quantization.format is {name}, which goes before the bits of the cells: name the formats to "
            f"compare, such as --{SECTION}.formats '[{name}]'"
        )
    target = words.get("quantization.target") or "null"
    if target != "null" and AUTO not in chosen.formats:
        raise UserError(f"quantization.target is {target}, which needs {AUTO} among --{SECTION}.formats")
    if chosen.formats and words.get(f"{SECTION}.bits"):
        raise UserError(
            f"{SECTION}.formats says what the grids of all cells are, and {SECTION}.bits too: leave one out"
        )
    if AUTO in chosen.formats and target == "null":
        check_format(QuantizationSettings(format=AUTO))  # which needs a target


def _mistakes(shared: Arguments, chosen: CompareSettings, config: PreTrainedConfig) -> list[str]:
    """Say which methods can't have the settings of a grid. Raises UserError where none can."""
    with quiet():
        parsed = AespaCLI(shared, "fit")
        trainer, given = first_trainer(parsed), parsed.settings
    found = []
    for grids in chosen.formats or chosen.bits:
        mistakes = {}
        for method in chosen.methods:
            own: dict[str, Any] = {"method": method, "bits" if isinstance(grids, int) else "format": grids}
            target = given.quantization.target if grids == AUTO else None
            settings = replace(given, quantization=replace(given.quantization, target=target, **own))
            try:
                # not the cells' device, whose memory this process would take a part of
                find_model(settings, CPU, weights=False)
                job = checked(settings, CPU, config)
                check_tuning(trainer, parsed.trainer_section, job.quantization.tuning, job.work)
            except UserError as error:
                mistakes[method] = str(error)
        if len(mistakes) == len(chosen.methods):
            raise UserError(next(iter(mistakes.values())))
        found += [f"{method}, {_named(grids)}: {mistake}" for method, mistake in mistakes.items()]
    return found


def _named(grids: int | str) -> str:
    return f"{grids} bits" if isinstance(grids, int) else grids


def _chosen(given: Arguments) -> CompareSettings:
    """Return what the cells are. Raises UserError where there are none, or a format is unknown."""
    own = replace(given, options=tuple(o for o in given.options if o.key.startswith(f"{SECTION}.")))
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(CompareSettings, SECTION)
    chosen: CompareSettings = parser.instantiate(parser.parse_args(own.words))[SECTION]
    for name, values in vars(chosen).items():
        if not values and name != "formats":
            raise UserError(f"{SECTION}.{name} is empty: name at least one")
    for name in chosen.formats:
        if name != AUTO:  # which needs a target of all cells
            check_format(QuantizationSettings(format=name))
    return chosen


def compare(
    settings: CompareSettings, given: Arguments, run_cell: Callable[[Sequence[str]], str], console: Console
) -> Path:
    """Run the cells, by ``run_cell`` as :func:`in_process`, and write their results; return the folder.

    Raises EndedError where some fail.
    """
    runs = given.setting("output.folder", OutputSettings().folder)
    folder = expanded(Path(runs, given.setting("output.name", SECTION)))
    _refuse_other(folder, given)
    with locked(folder, "give another --output.name"):
        return _run_cells(folder, settings, given, run_cell, console)


def _run_cells(
    folder: Path,
    settings: CompareSettings,
    given: Arguments,
    run_cell: Callable[[Sequence[str]], str],
    console: Console,
) -> Path:
    # all of them first: a process that is killed early leaves a table with every finished cell
    kinds: Sequence[int | str] = settings.formats or settings.bits
    every = product(kinds, settings.methods, settings.seeds)
    named = dict.fromkeys(Cell(method, grids, seed) for grids, method, seed in every)
    cells = [_finished(folder, cell) for cell in named]
    for number, cell in enumerate(cells):
        if cell.metrics is None:
            console.print(f"cell {number + 1} of {len(cells)}: {cell.name}", soft_wrap=True)
            failure = run_cell(_words(given, folder, cell))
            cells[number] = replace(_finished(folder, cell), failure=failure)
            if failure:
                console.print(f"{cell.name}: {failure}", soft_wrap=True)
            elif cells[number].metrics is not None:
                console.print(_result(cells[number]), soft_wrap=True)
        # so far: they can be read while the rest is under way
        write_text(folder / "compare.csv", cells_csv(cells))
        write_text(folder / "compare.md", summary(cells).markdown())
    print_table(console, summary(cells))
    others = {file.parents[1].name for file in folder.glob("*/version_*/metrics.json")}
    if others := others - {cell.name for cell in cells}:
        words = f"finished before, but not named now, and so not in the table: {', '.join(sorted(others))}"
        console.print(words, soft_wrap=True)
    try:
        drawn = figure(cells)
    except ModuleNotFoundError as error:
        words = f"no figure: {error.name} is not installed ({install_command('report')})"
        console.print(words, soft_wrap=True)
    else:
        if drawn is not None:
            write_whole(folder / "compare.svg", partial(drawn.savefig, format="svg"))
    if failed := [cell.name for cell in cells if cell.metrics is None]:
        raise EndedError(
            f"{len(failed)} of {len(cells)} cells have failed ({', '.join(failed)}), and "
            f"{folder / 'compare.md'} says why; the others are kept",
            status=1,
        )
    return folder


def _result(cell: Cell) -> str:
    """Return in one line what a cell has measured, and how long it took."""
    metrics = cell.metrics or {}
    texts = [f"{text} {value:.3f}" for text, value in metrics["perplexity"].get("quantized", {}).items()]
    measured = f"perplexity {', '.join(texts)}, " if texts else ""
    return f"{cell.method}, {_named(cell.grids)}: {measured}{metrics['seconds']['quantization']:.0f} s"


def _words(given: Arguments, folder: Path, cell: Cell) -> list[str]:
    """Return the options of fit for one cell; a run that was begun is continued."""
    return given.then(
        Option("quantization.method", cell.method),
        Option(f"quantization.{'bits' if isinstance(cell.grids, int) else 'format'}", str(cell.grids)),
        *([] if cell.grids == AUTO else [Option("quantization.target", "null")]),
        Option("data.calibration.seed", str(cell.seed)),
        Option("output.folder", str(folder)),
        Option("output.name", cell.name),
        Option("ckpt_path", "last"),
    ).words


def _finished(folder: Path, cell: Cell) -> Cell:
    """Return the cell with the metrics of its run, if that is finished."""
    try:
        last = last_run(folder, cell.name)
        return replace(cell, metrics=None if last is None else Run.open(last).metrics())
    except UserError:  # fit says what is wrong with the run, and the other cells go on
        return cell


def _refuse_other(folder: Path, given: Arguments) -> None:
    """Note what the cells of a folder share. Raises UserError where others of its cells don't share it."""
    file = folder / "compare.json"
    options = {o.key: o.value for o in given.given() if not o.key.startswith("output.")}
    of_files = {f"content of {name}": content for name, content in _contents(given).items()}
    # as it comes back from the file: keys of a YAML mapping may be numbers
    shared = json.loads(json.dumps({"version of aespa-pl": aespa_pl.__version__, **options, **of_files}))
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    before = read_json(file) if file.is_file() else shared
    if changes := differences(before, shared):
        raise UserError(
            f"{folder} has a comparison with other options ({'; '.join(changes)}): give another "
            f"--output.name, or remove {file} if the difference changes no result"
        )
    write_json(file, shared)


def _contents(given: Arguments) -> dict[str, str]:
    """Return checksums of the local model and texts that options name; cells say what is wrong with them."""
    found = {}
    if (model := expanded(given.setting("model.pretrained", ""))) != Path() and model.is_dir():
        weights = (path for path in model.iterdir() if path.suffix in (".safetensors", ".bin"))
        found["model.pretrained"] = model_fingerprint([*model.glob("config.json"), *weights])
    for _, text in _texts(given):
        if is_file(text) and expanded(text).is_file():
            found[text] = checksum(expanded(text))
    return found


def _texts(given: Arguments) -> Iterator[tuple[str, str]]:
    """Yield key and name of each text that options name; cells say what is wrong with other values."""
    for key in (CALIBRATION_KEY, EVALUATION_KEY):
        with suppress(yaml.YAMLError):
            named = yaml.safe_load(given.setting(key, "null"))
            every = named if isinstance(named, list | dict) else [named]
            yield from ((key, text) for text in every if isinstance(text, str))
