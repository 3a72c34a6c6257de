"""Sources: a checkpoint's files found on this machine, or downloaded into huggingface_hub's cache.

Its environment variables hold for all downloads, torchvision's too: HF_HOME, HF_HUB_OFFLINE, HF_HUB_DOWNLOAD_TIMEOUT,
HF_HUB_DISABLE_PROGRESS_BARS; and for the hub's HF_ENDPOINT and HF_TOKEN.
"""

import contextlib
import difflib
import hashlib
import http.client
import os
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from eqzoo._facts import timm_facts, torchvision_facts, transformers_facts

from .errors import CheckpointError, listing
from .formats import ENDINGS, names_by_shard

WAITS = (0.5, 1.0, 2.0, 4.0)  # seconds before each further try of a download from torchvision

_CONFIG = "config.json"
_PREPROCESSOR = "preprocessor_config.json"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_CHUNK = 1 << 20


def fetch(source: str | os.PathLike, *, revision: str | None = None) -> Path:
    """Where the files of a source are on this machine, downloaded first if need be.

    A path that exists is itself; "torchvision/NAME.WEIGHTS" is a file; a hub id "owner/name" is a folder that holds the
    repository's configs and one format of its weights, at the `revision` given (a branch, tag or commit).
    """
    if (path := _local_path(source, revision)) is not None:
        return path
    source = _checked_name(source)
    if source.startswith("torchvision/"):
        return _fetch_torchvision(source, revision)
    return _fetch_repository(source, revision, with_weights=True)


def fetch_config(source: str | os.PathLike, *, revision: str | None = None) -> Path:
    """`fetch` without the weights: a folder with the repository's configs; a path that exists is itself."""
    if (path := _local_path(source, revision)) is not None:
        return path
    source = _checked_name(source)
    if source.startswith("torchvision/"):
        raise ValueError(f"{source!r} has no config file; a hub id owner/name or a local folder was expected")
    return _fetch_repository(source, revision, with_weights=False)


def fetch_files(source: str | os.PathLike, files: Sequence[str], *, revision: str | None = None) -> Path:
    """Those of these files that a repository has, in a folder; a path that exists is itself."""
    if (path := _local_path(source, revision)) is not None:
        return path
    snapshot = _Snapshot(_checked_name(source), revision)
    for file in files:
        snapshot.get(file)
    if snapshot.folder is None:
        raise snapshot.lacks(tuple(files))
    return snapshot.folder


def _local_path(source: str | os.PathLike, revision: str | None) -> Path | None:
    if not os.path.exists(source):
        return None
    if revision is not None:
        raise ValueError(f"revision={revision!r} was given, but {os.fspath(source)!r} is a local path: leave it out")
    return Path(source)


def _checked_name(source: str | os.PathLike) -> str:
    """The source, if it can be the name of something to download."""
    if isinstance(source, str) and re.fullmatch(r"\w[\w.-]*/[\w.-]+", source) and not source.endswith(ENDINGS):
        return source
    path = Path(source)
    near = difflib.get_close_matches(path.name, os.listdir(path.parent) if path.parent.is_dir() else [])
    if isinstance(source, str) and re.fullmatch(r"[\w.-]+", source) and not source.endswith(ENDINGS):
        hint = f"did you mean the local {listing(near)}?" if near else _remedy(source)
        raise ValueError(f"{source!r} is neither a file or folder nor the name of a source; {hint}")
    hint = f"did you mean {listing(near)}?" if near else "check the path"
    raise FileNotFoundError(f"there is no file or folder {os.fspath(source)!r}; {hint}")


def _remedy(source: str) -> str:
    """What to write instead of the name of a source that doesn't exist."""
    architectures = {f"torchvision/{name}": name.partition(".")[0] for name in torchvision_facts()}
    architectures |= {f"timm/{name}": name.partition(".")[0] for name in timm_facts()}
    architectures |= {name: fact["variant"] for name, fact in transformers_facts().items()}
    owner, _, name = source.rpartition("/")
    architecture = name.partition(".")[0]
    same = [known for known in architectures if architectures[known] == architecture and known.startswith(owner)]
    if name == architecture and same:
        return f"{architecture} comes from {listing(same)}"
    near = difflib.get_close_matches(source, same, n=4, cutoff=0) or [
        known
        for near in difflib.get_close_matches(name, [known.rpartition("/")[2] for known in architectures], n=4)
        for known in architectures
        if known.endswith(f"/{near}")
    ]
    if near:
        return f"did you mean {listing(near)}?"
    return "give a path, a hub id owner/name, or torchvision/NAME.WEIGHTS such as 'torchvision/resnet50.IMAGENET1K_V2'"


@dataclass
class _Snapshot:
    """One commit of a repository in the cache; the first file that is found settles which."""

    repository: str
    revision: str | None
    folder: Path | None = None

    def get(self, file: str) -> bool:
        """Has the file put into the folder. False if the repository has none, or if offline and it isn't there."""
        from huggingface_hub import _CACHED_NO_EXIST, constants, hf_hub_download, try_to_load_from_cache
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        if self.folder is not None:
            cached = try_to_load_from_cache(self.repository, file, revision=self.revision)
            if cached is _CACHED_NO_EXIST:
                return False
        with _in_one_sentence(self.repository, self.revision, file):
            try:
                path = Path(hf_hub_download(self.repository, file, revision=self.revision))
            except LocalEntryNotFoundError:
                if not constants.HF_HUB_OFFLINE:
                    raise
                return False
            except EntryNotFoundError:
                return False
        self.folder = path.parents[file.count("/")]
        self.revision = self.folder.name
        return True

    def lacks(self, files: tuple[str, ...]) -> Exception:
        """What to raise if the repository has none of these files."""
        from huggingface_hub import HfApi, constants

        wanted = " or ".join(files)
        if constants.HF_HUB_OFFLINE:
            return FileNotFoundError(
                f"HF_HUB_OFFLINE is set and {wanted} of {self.repository!r} is not in {constants.HF_HUB_CACHE}; "
                f"unset it, or copy the files there{_misspelt(self.repository)}"
            )
        with _in_one_sentence(self.repository, self.revision, wanted):
            held = HfApi().list_repo_files(self.repository, revision=self.revision)
        return CheckpointError(
            f"the repository {self.repository!r} has no {wanted}; it holds {listing(held)}: "
            f"download the file that you want, and give its path"
        )


def _fetch_repository(repository: str, revision: str | None, *, with_weights: bool) -> Path:
    snapshot = _Snapshot(repository, revision)
    snapshot.get(_CONFIG)
    if with_weights:
        weights = next(filter(snapshot.get, _WEIGHTS), None)
        if weights is None:
            raise snapshot.lacks(_WEIGHTS)
        assert snapshot.folder is not None
        for shard in sorted(names_by_shard(snapshot.folder / weights)) if weights.endswith(".json") else ():
            if not snapshot.get(shard):
                raise snapshot.lacks((shard,))
    snapshot.get(_PREPROCESSOR)
    if snapshot.folder is None:
        raise snapshot.lacks((_CONFIG,))
    return snapshot.folder


@contextlib.contextmanager
def _in_one_sentence(repository: str, revision: str | None, file: str) -> Iterator[None]:
    """What huggingface_hub raises, as one sentence that says what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage] of the HTTP library that it rests on
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    endpoint = constants.ENDPOINT
    log_in = "log in with `hf auth login` or set HF_TOKEN"
    try:
        yield
    except HFValidationError as error:
        raise ValueError(f"{repository!r} cannot be a hub id; {_remedy(repository)}") from error
    except GatedRepoError as error:
        raise ValueError(
            f"{repository!r} is gated: accept its licence at {endpoint}/{repository}, and {log_in}"
        ) from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{endpoint} has no repository {repository!r}, or it is private: check the name, or {log_in}"
            f"{_misspelt(repository)}"
        ) from error
    except RevisionNotFoundError as error:
        raise ValueError(
            f"{repository!r} has no revision {revision!r}; give a branch, tag or commit listed at "
            f"{endpoint}/{repository}/commits/main"
        ) from error
    except (HTTPError, LocalEntryNotFoundError) as error:
        cause = (isinstance(error, LocalEntryNotFoundError) and error.__cause__) or error
        if isinstance(cause, HfHubHTTPError) and cause.response.status_code in (401, 403):
            raise ValueError(
                f"{endpoint} refuses access to {repository!r} ({_reason(cause)}): {log_in}, if the token may read it"
            ) from error
        raise FileNotFoundError(
            f"{file} of {repository!r} could not be had from {endpoint} ({_reason(cause)}) and is not in "
            f"{constants.HF_HUB_CACHE}: check the connection, or HF_ENDPOINT"
        ) from error


def _misspelt(repository: str) -> str:
    is_unknown = repository.startswith("timm/") and repository.removeprefix("timm/") not in timm_facts()
    return f"; {_remedy(repository)}" if is_unknown else ""


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0][:200]


def _fetch_torchvision(source: str, revision: str | None) -> Path:
    from filelock import FileLock
    from huggingface_hub import cached_assets_path, constants

    facts = torchvision_facts().get(source.removeprefix("torchvision/"))
    if facts is None:
        raise ValueError(f"torchvision has no weights {source!r}; {_remedy(source)}")
    if revision is not None:
        raise ValueError(f"revision={revision!r} was given, but torchvision's weights have none: leave it out")
    url = facts["url"]
    path = cached_assets_path("eqzoo", namespace="torchvision") / url.rpartition("/")[2]
    if path.exists():
        return path
    if constants.HF_HUB_OFFLINE:
        raise FileNotFoundError(
            f"HF_HUB_OFFLINE is set and {path.name} of {source!r} is not in {path.parent}; "
            f"unset it, or copy the file there from {url}"
        )
    with FileLock(f"{path}.lock"):
        if not path.exists():  # another process may have downloaded it while this one waited
            incomplete = path.with_name(f"{path.name}.incomplete")
            _download(url, incomplete)
            _check_hash(incomplete, facts["sha256"], url)
            os.replace(incomplete, path)
    return path


def _check_hash(file: Path, expected: str, url: str) -> None:
    with open(file, "rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        os.fsync(opened.fileno())
    if not digest.startswith(expected):
        file.unlink()
        raise CheckpointError(
            f"{url} is not what torchvision published: its SHA-256 is {digest} and should begin with {expected}; "
            f"the download was deleted, try again or look for a proxy that changes files"
        )


def _download(url: str, incomplete: Path) -> None:
    """The whole of `url` in `incomplete`, continuing what is there; failures that may pass are tried again."""
    for wait in (*WAITS, None):
        try:
            _download_rest(url, incomplete)
            return
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as error:
            may_pass = not isinstance(error, urllib.error.HTTPError) or error.code >= 500 or error.code in (408, 429)
            if wait is None or not may_pass:
                raise FileNotFoundError(
                    f"{url} could not be downloaded ({_reason(error)}): check the connection; "
                    f"the next call continues what {incomplete.parent} has of it"
                ) from error
        time.sleep(wait)


def _download_rest(url: str, incomplete: Path) -> None:
    from huggingface_hub import constants
    from huggingface_hub.utils import tqdm

    start = incomplete.stat().st_size if incomplete.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        response = urllib.request.urlopen(request, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != 416:
            raise
        if error.headers.get("Content-Range") == f"bytes */{start}":  # all of it is here already
            return
        incomplete.unlink()
        raise ConnectionError(f"{url} is shorter than the part of it that was here") from error
    with response:
        content_range = response.headers.get("Content-Range", "")
        if response.status == 206 and not content_range.startswith(f"bytes {start}-"):
            incomplete.unlink()
            raise ConnectionError(f"bytes from {start} on were asked for, and {content_range!r} came")
        if response.status != 206:  # the server sends the file from its beginning
            start = 0
        length = response.headers.get("Content-Length")
        total = None if length is None else start + int(length)
        with (
            open(incomplete, "r+b" if start else "wb") as file,
            tqdm(desc=url.rpartition("/")[2], total=total, initial=start, unit="B", unit_scale=True) as progress,
        ):
            file.seek(start)
            while chunk := response.read1(_CHUNK):
                file.write(chunk)
                progress.update(len(chunk))
            size = file.tell()
    if total is not None and size != total:
        raise ConnectionError(f"the connection ended after {size} of {total} bytes")
