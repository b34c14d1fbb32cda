"""Run ``aespa-pl export``: pack a finished run for an engine, and prove the files before they are kept."""

import logging
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, get_args

from filelock import FileLock, Timeout
from huggingface_hub import HfApi
from jsonargparse import auto_cli
from rich.table import Table

from aespa_pl.commands.arguments import is_own
from aespa_pl.commands.keys import A_RUN, in_words
from aespa_pl.commands.limits import check_space
from aespa_pl.commands.output import quiet
from aespa_pl.errors import UserError
from aespa_pl.evaluation.table import measured
from aespa_pl.export.agreement import Asked, Verify, ask, choose_engines, that_fit
from aespa_pl.export.format import ClassSize, Format, FormatName, make_format, prove
from aespa_pl.export.model_card import model_card
from aespa_pl.export.quantized import QuantizedModel
from aespa_pl.measure import human
from aespa_pl.models.hub import HUB_NAME
from aespa_pl.paths import expanded
from aespa_pl.progress import PlainConsole, WalkProgress
from aespa_pl.run.find import LAST, find_run, refuse_smoke_test
from aespa_pl.run.interruption import Interruption
from aespa_pl.storage.files import disk_errors, write_text

log = logging.getLogger(__name__)

Embedding = Literal["keep", "q8_0"]
WEIGHT_FILES = (".safetensors", ".gguf")  # suffixes
PARTIAL = ".aespa-pl.partial"  # folder in the target with the files of an export that is not finished
LOCK, FORMAT = "lock", "format"  # files in it that are not the target's


def run(words: Sequence[str], interruption: Interruption) -> None:  # noqa: ARG001 - as all commands
    """Read the words of the command line, and export. Raises UserError where :func:`export` does."""
    formats = f"--format is missing: one of {', '.join(get_args(FormatName))}"
    with in_words(export, run=A_RUN, format=formats):
        auto_cli(export, args=list(words[1:]), prog="aespa-pl export", exit_on_error=False)


def export(
    run: str,
    *,
    format: FormatName,  # noqa: A002 - the option is called --format
    output: str | None = None,
    verify: Verify = "auto",
    container_bits: Literal[4, 8] | None = None,
    embedding: Embedding | None = None,
    original: str | None = None,
    push_to_hub: str | None = None,
    runs_folder: str = "lightning_logs",
    name: str | None = None,
) -> None:
    """Write the quantized model of a finished run in the format of an engine, and prove that it is it.

    Args:
        run: Folder of a run (NAME/version_N); last: the run of runs_folder that was worked on last.
        format: hf (Hugging Face, the original's types), compressed-tensors (vLLM, transformers), awq
            (vLLM, 4 bits), gptq (GPTQModel) or gguf (llama.cpp).
        output: Folder to write; null: export/FORMAT in the run's folder.
        verify: Besides the bytes, which are always read back and compared: the engine that must give the
            run's next-token distributions. auto: all that are installed, fit and run here; bytes: none.
        container_bits: Bits that each integer takes, if more than it has: vLLM's CPU build runs 2 and 3 bits
            in 4; where quantization.bits_of gave several, all take these.
        embedding: Type of embedding and head. q8_0, of gguf alone, rounds them to 8.5 bits a weight; keep:
            they stay. null: q8_0 in gguf where 32 divides their rows, keep elsewhere. llama.cpp rounds them
            too, often to smaller types; a run with quantization.format Q4_K_M has llama.cpp's own types.
        original: Folder of the model that was quantized, if it is no longer where the run found it.
        push_to_hub: Name of a repository on the Hugging Face hub that gets the folder as well.
        runs_folder: With last: the folder of all runs, their output.folder.
        name: With last: the name of the run; null: any.

    Raises:
        UserError: The run or the output folder can't be used, or the format can't hold the run exactly.
    """
    chosen = make_format(format, container_bits, embedding)
    questions = choose_engines(format, verify)
    if name and run != LAST:
        raise UserError(f"--name {name} chooses among runs, and {run} is one already: leave one of them out")
    folder = find_run(run, expanded(runs_folder), name)
    refuse_smoke_test(folder)
    target = expanded(output).absolute() if output else folder / "export" / format
    others = {path.name for path in target.iterdir()} - {PARTIAL} if target.is_dir() else set[str]()
    if target.is_file() or (others and _begun(target) != format):  # what it has moved already is replaced
        raise UserError(f"--output: {target} exists and is not an empty folder: choose another")
    model = QuantizedModel.open(folder, original, trusts_places=is_own(folder))
    chosen.refuse(model)
    # no format exceeds the size of the original by much
    files = {tensor.file for tensor in model.pretrained.tensors.values()}
    check_space(target, sum(file.stat().st_size for file in files), "choose another folder with --output")
    if push_to_hub is not None:
        if not HUB_NAME.fullmatch(push_to_hub):
            raise UserError(f"--push_to_hub is {push_to_hub}: expected a name on the hub such as org/name")
        try:
            HfApi().whoami()
        except Exception as error:  # which class that is depends on the HTTP library under the client
            raise UserError(
                f"--push_to_hub {push_to_hub}: the hub does not know who you are ({error}): hf auth login"
            ) from error
    questions = that_fit(model, questions)
    own = {"format": format, "container_bits": container_bits, "embedding": embedding}
    options = " ".join(f"--{name} {value}" for name, value in own.items() if value is not None)
    command = f"aespa-pl export last {options}"
    for note in measured(folder)[1]:
        log.warning("%s: %s", folder, note)
    model_card(model, chosen, command, {})  # what can't be described is said before hours of work
    console = PlainConsole()
    with WalkProgress(console) as progress, _growing(target, format) as partial:
        progress.begin("Writing, blocks", model.block_count)
        chosen.write(model, partial, progress.advance)
        progress.begin("Reading back, blocks", model.block_count)
        sizes = prove(model, chosen, partial, progress.advance)
        with quiet():
            answers = ask(model, chosen, partial, questions)
        verified = {agreement.engine: agreement.text for agreement in answers.agreements}
        write_text(partial / "README.md", model_card(model, chosen, command, verified, answers.beside))
    console.print(_table(chosen, target, sizes))
    for line in _lines(chosen, model, answers):
        console.print(line, soft_wrap=True)
    if push_to_hub is not None:
        push(target, push_to_hub)
        console.print(f"pushed to https://huggingface.co/{push_to_hub}", soft_wrap=True)
    console.print(str(target), soft_wrap=True)


def _begun(target: Path) -> str:
    """Return the format of an export to a folder that was killed; empty where there is none."""
    with suppress(OSError):
        return (target / PARTIAL / FORMAT).read_text()
    return ""


@contextmanager
def _growing(target: Path, chosen: str) -> Iterator[Path]:
    """Give a folder in ``target`` to write to, whose files become the target's when the context ends well."""
    partial = target / PARTIAL
    with disk_errors(target):
        partial.mkdir(parents=True, exist_ok=True)
        lock = FileLock(partial / LOCK)
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise UserError(
                f"--output: another export is writing to {target}: wait for it, or choose another folder"
            ) from error
    try:
        for left in partial.iterdir():  # by a process that was killed
            if left.is_dir():
                shutil.rmtree(left)
            elif left.name != LOCK:
                left.unlink()
        write_text(partial / FORMAT, chosen)
        yield partial
        with disk_errors(target):
            # the weights first: a folder that has config.json and README.md is complete
            for file in sorted(partial.iterdir(), key=lambda file: file.suffix not in WEIGHT_FILES):
                if file.name not in (LOCK, FORMAT):
                    file.replace(target / file.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        lock.release()
        with suppress(OSError):  # where it has the files
            target.rmdir()


def push(folder: Path, name: str) -> None:
    """Upload a folder to a repository on the hub, which is made if there is none."""
    api = HfApi()
    try:
        api.create_repo(name, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=name)
    except Exception as error:  # which class that is depends on the HTTP library under the client
        raise UserError(
            f"--push_to_hub: {name} cannot be uploaded ({error}). The export is complete in {folder}: "
            f"hf upload {shlex.quote(name)} {shlex.quote(str(folder))}"
        ) from error


def _table(chosen: Format, folder: Path, sizes: Mapping[str, ClassSize]) -> Table:
    table = Table(title=chosen.name, title_justify="left")
    for heading in ("tensors", "weights", "bits a weight", "size", "original"):
        table.add_column(heading, justify="left" if heading == "tensors" else "right")
    files = ClassSize(
        weights=sum(size.weights for size in sizes.values()),
        size=sum(f.stat().st_size for f in folder.iterdir() if f.suffix in WEIGHT_FILES),
        original=sum(size.original for size in sizes.values()),
    )
    for kind, size in {**sizes, "files": files}.items():
        table.add_row(
            kind,
            f"{size.weights:,}",
            f"{8 * size.size / max(1, size.weights):.3f}",
            human(size.size, "B"),
            human(size.original, "B"),
            end_section=kind == [*sizes][-1],
        )
    return table


def _lines(chosen: Format, model: QuantizedModel, answers: Asked) -> list[str]:
    rounded, remark = chosen.rounded(model), chosen.remark(model)
    exactly = f"equal to the run, bit for bit{'' if rounded is None else f', except that {rounded}'}"
    return [
        f"read back by {chosen.reader}: {exactly}",
        *(f"{agreement.engine}: {agreement.text}" for agreement in answers.agreements),
        *([] if answers.beside is None else [f"beside the original: {answers.beside}"]),
        *(f"{engine}: not checked, {reason}" for engine, reason in answers.unchecked.items()),
        *([remark] if remark else []),
    ]
