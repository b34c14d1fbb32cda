"""Find the folder on this machine that ``model.pretrained`` means, and download it if need be."""

import logging
import re
from collections.abc import Iterable
from fnmatch import fnmatch
from importlib.resources import files
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download, scan_cache_dir, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    CacheNotFound,
    GatedRepoError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from aespa_pl.errors import UserError
from aespa_pl.paths import expanded

logger = logging.getLogger(__name__)

EMBEDDED = "embedded:"
HUB_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*")
COMPANIONS = (
    "config.json", "generation_config.json", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json",
    "*.model",  # SentencePiece's
    "added_tokens.json", "chat_template*", "additional_chat_templates/*", *LICENCES,
)  # fmt: skip
"""Files beside the weights that belong to a model, unless they are ``CODE``."""
CODE = "*.py"
"""Files that are neither downloaded nor copied."""
SAFETENSORS = ("model*.safetensors", "model.safetensors.index.json")
PICKLES = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
"""Weights of models without safetensors; ``pickles.py`` reads nothing but tensors from them."""
CONVERTER = "SFconvertbot"
"""The hub's account that offers safetensors, in a pull request, to models that have pickles only
(facebook/opt-125m)."""


def resolve(pretrained: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """Return the folder of a model, which is ``embedded:NAME``, a folder, or a name on the hub.

    Without weights only config.json is downloaded. Without a revision (branch, tag or commit) it is main, or
    the hub's own conversion to safetensors where main has none and there is a conversion.

    Raises:
        UserError: There is no such folder or model, it can't be reached, or has no weights.
    """
    if pretrained.startswith(EMBEDDED):
        root = Path(str(files("aespa_pl") / "embedded"))
        names = sorted(EMBEDDED + path.parent.name for path in root.glob("*/config.json"))
        if pretrained not in names:
            known = ", ".join(names) or "none in this installation"
            raise UserError(f"model.pretrained: no model {pretrained}: there are {known}")
        return root / pretrained.removeprefix(EMBEDDED)
    folder = expanded(pretrained)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UserError(f"model.pretrained: {folder} is a file: give the folder that it lies in")
    if pretrained.startswith((".", "/", "~")) or not HUB_NAME.fullmatch(pretrained):
        raise UserError(
            f"model.pretrained: there is no folder {folder}: give a folder with config.json and "
            "weights, a name on the hub such as org/name, or embedded:NAME"
        )
    return _from_hub(pretrained, revision, weights=weights)


def is_local(pretrained: str) -> bool:
    """Return whether a model, or a text, lies on this machine or in this package."""
    return pretrained.startswith((EMBEDDED, "~", "/", ".")) or expanded(pretrained).exists()


def here(pretrained: str, revision: str | None = None) -> Path | None:
    """Return the folder with a model's config.json, None where it would have to be downloaded."""
    if HUB_NAME.fullmatch(pretrained) and not Path(pretrained).exists():
        config = try_to_load_from_cache(pretrained, "config.json", revision=revision)
        return Path(config).parent if isinstance(config, str) else None
    return resolve(pretrained, revision, weights=False)


def _from_hub(name: str, revision: str | None, *, weights: bool) -> Path:
    logger.warning("model.pretrained: asking the Hugging Face hub for %s", name)
    try:
        if not weights:
            return Path(hf_hub_download(name, "config.json", revision=revision)).parent
        chosen, files = _best_weights(name, revision)
        # README.md states the licence, which the cards of exported models repeat
        patterns = [*COMPANIONS, "README.md", *files]
        return Path(snapshot_download(name, revision=chosen, allow_patterns=patterns, ignore_patterns=CODE))
    except GatedRepoError as error:
        raise UserError(
            f"model.pretrained: {name} is gated: accept its licence at https://huggingface.co/{name}"
            " and log in with 'hf auth login', or give model.pretrained a local folder"
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(
            f"model.revision: {name} has no revision {revision!r} on the hub: "
            f"see https://huggingface.co/{name}/tree/main"
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"model.pretrained: {name} is neither a folder here nor a model on the hub (or it is "
            "private: log in with 'hf auth login'): correct it, or give model.pretrained a local "
            "folder"
        ) from error
    except UserError:
        raise
    except Exception as error:
        # No network: which class that is depends on the HTTP library under the hub's client.
        if (cached := _cached(name, revision)) is not None:
            logger.warning("%s: the hub cannot be reached, using %s", name, cached)
            return cached
        raise UserError(
            f"model.pretrained: {name} cannot be downloaded ({error}): give model.pretrained a "
            "local folder, or download it where there is a network and copy the cache (HF_HOME)"
        ) from error


def _best_weights(name: str, revision: str | None) -> tuple[str | None, tuple[str, ...]]:
    """Return the revision to take, and the patterns of its files with weights.

    Safetensors of the revision that the user named (or of main) come first; then, unless the user
    named one, the hub's conversion; pickles come last.
    """
    api = HfApi()
    names = _files(api, name, revision)
    if _has(names, SAFETENSORS):
        return revision, SAFETENSORS
    if revision is None:
        for request in api.get_repo_discussions(name, author=CONVERTER, discussion_type="pull_request"):
            offer = request.git_reference
            if offer and _has(_files(api, name, offer), SAFETENSORS):
                logger.warning("%s: main has no safetensors, using %s of %s", name, offer, CONVERTER)
                return offer, SAFETENSORS
    if _has(names, PICKLES):
        return revision, PICKLES
    raise UserError(
        f"model.pretrained: {name} has neither safetensors nor pytorch_model.bin on the hub: load it "
        "with transformers, save it with save_pretrained, and give model.pretrained that folder"
    )


def _files(api: HfApi, name: str, revision: str | None) -> list[str]:
    # list_repo_files asks a hub that can't be reached again for half a minute; this does not
    return [file.rfilename for file in api.model_info(name, revision=revision).siblings or ()]


def _has(names: Iterable[str], patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, patterns[0]) and "/" not in name for name in names)


def _cached(name: str, revision: str | None) -> Path | None:
    """Return the newest downloaded snapshot that fits the revision, with safetensors rather than pickles."""
    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return None
    snapshots = [
        snapshot
        for repository in repositories
        if (repository.repo_type, repository.repo_id) == ("model", name)
        for snapshot in repository.revisions
        if revision is None or revision in snapshot.refs or revision == snapshot.commit_hash
    ]
    for patterns in (SAFETENSORS, PICKLES):
        names = ([f.file_path.relative_to(s.snapshot_path).as_posix() for f in s.files] for s in snapshots)
        if fitting := [s for s, its in zip(snapshots, names, strict=True) if _has(its, patterns)]:
            return max(fitting, key=lambda snapshot: snapshot.last_modified).snapshot_path
    return None
