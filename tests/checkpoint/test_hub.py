"""Sources are found, or downloaded once, whole and unchanged, over real HTTP; what goes wrong takes one sentence."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants

from eqzoo.checkpoint import CheckpointError, hub
from tests.server import Fault, Server, serving_as_the_hub

WEIGHTS = np.random.default_rng(0).bytes(1 << 20)
SOURCE = "torchvision/net.V1"


@pytest.fixture
def server(tmp_path, monkeypatch):
    with serving_as_the_hub(tmp_path, monkeypatch) as server:
        facts = {
            "net.V1": {"url": f"{server.url}/models/net-{_sha256(WEIGHTS)[:8]}.pth", "sha256": _sha256(WEIGHTS)[:8]}
        }
        monkeypatch.setattr(hub, "torchvision_facts", lambda: facts)
        put(server, "models", {Path(facts["net.V1"]["url"]).name: WEIGHTS})
        yield server


@pytest.fixture
def no_waiting(monkeypatch):
    """huggingface_hub's own waits between tries."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def put(server: Server, folder: str, files: dict[str, bytes]) -> None:
    (server.root / folder).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (server.root / folder / name).write_bytes(content)


def torchvision_file(tmp_path: Path) -> Path:
    return tmp_path / "home" / "assets" / "eqzoo" / "torchvision" / "default" / f"net-{_sha256(WEIGHTS)[:8]}.pth"


def part(tmp_path: Path) -> Path:
    """Where an earlier download left what it had got."""
    file = torchvision_file(tmp_path)
    file.parent.mkdir(parents=True, exist_ok=True)
    return file.with_name(f"{file.name}.incomplete")


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def names(paths: list[str]) -> list[str]:
    return [path.rpartition("/")[2] for path in paths]


SAFETENSORS = {"model.safetensors": b"whole"}
BIN = {"pytorch_model.bin": b"pickled"}
SHARDED_SAFETENSORS = {
    "model.safetensors.index.json": b'{"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}',
    "part-1.safetensors": b"one",
    "part-2.safetensors": b"two",
}
SHARDED_BIN = {"pytorch_model.bin.index.json": b'{"weight_map": {"a": "part-1.bin"}}', "part-1.bin": b"one"}
CONFIGS = {"config.json": b"{}", "preprocessor_config.json": b"[]"}
UNWANTED = {"README.md": b"", "tf_model.h5": b"", "part-3.safetensors": b""}


# Paths and names


@pytest.mark.parametrize("fetch", [hub.fetch, hub.fetch_config])
def test_a_path_that_exists_is_itself(fetch, tmp_path, server):
    (tmp_path / "weights.pth").touch()
    for source in (tmp_path, tmp_path / "weights.pth", str(tmp_path)):
        assert fetch(source) == Path(source)
        with pytest.raises(ValueError, match="revision='v1' was given, .* is a local path"):
            fetch(source, revision="v1")
    assert not server.requests


def test_a_missing_path_names_its_neighbours(tmp_path, server):
    (tmp_path / "resnet50.safetensors").touch()
    for source in (str(tmp_path / "resnet5.safetensors"), tmp_path / "resnet5.safetensors"):
        with pytest.raises(FileNotFoundError, match=r"no file or folder '.*'; did you mean 'resnet50.safetensors'\?"):
            hub.fetch(source)
    assert not server.requests


@pytest.mark.parametrize("source", [Path("owner/name"), "checkpoints/net.pth", "./name", "~/name", "a/b/c", ""])
def test_a_missing_path_is_not_taken_for_a_hub_id(source, server):
    with pytest.raises(FileNotFoundError, match="check the path"):
        hub.fetch(source)
    assert not server.requests


def test_the_name_of_a_model_is_answered_with_its_sources():
    with pytest.raises(
        ValueError, match="resnet50 comes from 'torchvision/resnet50.IMAGENET1K_V1'.*'timm/resnet50.a1_"
    ):
        hub.fetch("resnet50")
    with pytest.raises(ValueError, match="gpt2-large comes from 'openai-community/gpt2-large'"):
        hub.fetch("gpt2-large")


def test_a_misspelt_name_is_answered_with_near_ones(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match=r"did you mean 'torchvision/resnet50.IMAGENET1K_V2'"):
        hub.fetch("torchvision/resnet50.IMAGENET_V2")
    with pytest.raises(ValueError, match=r"did you mean 'timm/resnet50.a1_in1k'"):
        hub.fetch("resnet50.a1_in1")
    with pytest.raises(ValueError, match=r"give a path, a hub id owner/name, or torchvision"):
        hub.fetch("zzzzzz")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoint_7").mkdir()
    with pytest.raises(ValueError, match=r"did you mean the local 'checkpoint_7'"):
        hub.fetch("checkpoint_6")


# The hub


@pytest.mark.parametrize(
    ("weights", "others"),
    [
        (SAFETENSORS, SHARDED_SAFETENSORS | BIN | SHARDED_BIN),
        (SHARDED_SAFETENSORS, BIN | SHARDED_BIN),
        (BIN, SHARDED_BIN),
        (SHARDED_BIN, {}),
    ],
    ids=["safetensors", "sharded safetensors", "bin", "sharded bin"],
)
def test_only_the_configs_and_one_format_are_downloaded(weights, others, server):
    put(server, "owner/name", others | weights | CONFIGS | UNWANTED)
    folder = hub.fetch("owner/name")
    assert content(folder) == CONFIGS | weights
    assert sorted(names(server.paths("GET"))) == sorted(CONFIGS | weights)


def test_config_alone_needs_no_weights(server):
    put(server, "owner/name", CONFIGS | SAFETENSORS)
    assert content(hub.fetch_config("owner/name")) == CONFIGS
    assert hub.fetch("owner/name") == hub.fetch_config("owner/name")


def test_a_repository_may_lack_the_configs(server):
    put(server, "owner/name", SAFETENSORS)
    assert content(hub.fetch("owner/name")) == SAFETENSORS
    with pytest.raises(CheckpointError, match="has no config.json; it holds 'model.safetensors': download"):
        hub.fetch_config("owner/name")


def test_what_is_cached_costs_one_question(server):
    put(server, "owner/name", {"config.json": b"{}"} | SHARDED_SAFETENSORS)
    folder = hub.fetch("owner/name")
    server.requests.clear()
    assert hub.fetch("owner/name") == folder
    assert names(server.paths("HEAD")) == ["config.json"]
    assert not server.paths("GET")


def test_revisions(server):
    put(server, "owner/name", CONFIGS | SAFETENSORS)
    put(server, "owner/name@v2", CONFIGS | {"model.safetensors": b"second"})
    commit = server.commit("owner/name", "v2")
    for revision in ("v2", commit):
        folder = hub.fetch("owner/name", revision=revision)
        assert folder.name == commit
        assert content(folder) == CONFIGS | {"model.safetensors": b"second"}
    assert (hub.fetch("owner/name") / "model.safetensors").read_bytes() == b"whole"
    with pytest.raises(ValueError, match="'owner/name' has no revision 'v3'; give a branch"):
        hub.fetch("owner/name", revision="v3")


def test_files_of_a_repository_that_changes_meanwhile_are_of_one_commit(server, monkeypatch):
    put(server, "owner/name", CONFIGS | SAFETENSORS)
    put(server, "owner/name@old", CONFIGS | SAFETENSORS)  # keeps the commit available, as the hub does
    download = huggingface_hub.hf_hub_download

    def download_then_change(repository, file, revision):
        path = download(repository, file, revision=revision)
        put(server, "owner/name", {"config.json": b'{"new": 1}', "model.safetensors": b"new"})
        return path

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download_then_change)
    assert content(hub.fetch("owner/name")) == CONFIGS | SAFETENSORS
    assert (hub.fetch("owner/name") / "model.safetensors").read_bytes() == b"new"


def test_the_token_is_sent(server, monkeypatch):
    put(server, "owner/name", CONFIGS | SAFETENSORS)
    server.private.add("owner/name")
    with pytest.raises(
        ValueError, match=r"no repository 'owner/name', or it is private: .* `hf auth login` or set HF_TOKEN"
    ):
        hub.fetch("owner/name")
    monkeypatch.setenv("HF_TOKEN", server.token)
    assert content(hub.fetch("owner/name")) == CONFIGS | SAFETENSORS


def test_a_gated_repository_says_where_its_licence_is(server, monkeypatch):
    put(server, "owner/name", CONFIGS | SAFETENSORS)
    server.gated.add("owner/name")
    with pytest.raises(ValueError, match=rf"is gated: accept its licence at {server.url}/owner/name, .* set HF_TOKEN"):
        hub.fetch("owner/name")
    monkeypatch.setenv("HF_TOKEN", server.token)
    assert content(hub.fetch("owner/name")) == CONFIGS | SAFETENSORS


def test_a_refused_token_is_named(server):
    put(server, "owner/name", CONFIGS)
    server.faults["/owner/name/resolve/main/config.json"] = Fault(status=403)
    with pytest.raises(ValueError, match=r"refuses access to 'owner/name' \(.*403.*\): log in"):
        hub.fetch("owner/name")


def test_an_unknown_repository_of_timm_is_answered_with_near_ones(server):
    with pytest.raises(
        ValueError, match=r"no repository 'timm/resnet50.a1_in2k'.*did you mean 'timm/resnet50.a1_in1k'"
    ):
        hub.fetch("timm/resnet50.a1_in2k")
    with pytest.raises(ValueError, match=r"no repository 'timm/resnet18'.*resnet18 comes from 'timm/resnet18\."):
        hub.fetch("timm/resnet18")


def test_a_name_that_cannot_be_a_hub_id_is_not_asked_for(server):
    with pytest.raises(ValueError, match=r"'owner/na--me' cannot be a hub id; give a path"):
        hub.fetch("owner/na--me")
    assert not server.requests


def test_a_repository_without_weights_says_what_it_holds(server):
    put(server, "owner/name", {"config.json": b"{}"} | UNWANTED)
    with pytest.raises(
        CheckpointError, match=r"has no model.safetensors or .*; it holds .*'tf_model.h5': download the file"
    ):
        hub.fetch("owner/name")


@pytest.mark.parametrize("shard", ["../config.json", "/etc/hosts", "a/b.safetensors", "..\\x", "..", "", "."])
def test_a_shard_outside_its_folder_is_refused(shard, server):
    index = json.dumps({"weight_map": {"a": shard}}).encode()
    put(server, "owner/name", CONFIGS | {"model.safetensors.index.json": index})
    with pytest.raises(CheckpointError, match="is refused: it names a shard outside its own folder"):
        hub.fetch("owner/name")
    assert names(server.paths("GET")) == ["config.json", "model.safetensors.index.json"]


@pytest.mark.parametrize(
    "index", [b"", b"[]", b"{}", b'{"weight_map": 1}', b'{"weight_map": {"a": 1}}', b"[" * 100_000]
)
def test_a_corrupt_index_is_refused(index, server):
    put(server, "owner/name", CONFIGS | {"model.safetensors.index.json": index})
    with pytest.raises(CheckpointError, match="is truncated or corrupt"):
        hub.fetch("owner/name")


def test_a_shard_that_the_repository_lacks_is_named(server):
    put(server, "owner/name", CONFIGS | SHARDED_SAFETENSORS)
    (server.root / "owner/name/part-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no part-2.safetensors; it holds 'config.json'"):
        hub.fetch("owner/name")


@pytest.mark.parametrize("weights", [SAFETENSORS, SHARDED_BIN], ids=["safetensors", "sharded bin"])
@pytest.mark.parametrize("configs", [CONFIGS, {"config.json": b"{}"}, {}], ids=["both", "config", "none"])
def test_offline_the_cache_is_enough(weights, configs, server, monkeypatch):
    put(server, "owner/name", configs | weights)
    folder = hub.fetch("owner/name")
    server.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.fetch("owner/name") == folder
    assert not server.requests


def test_offline_what_is_missing_is_named(server, monkeypatch):
    put(server, "owner/name", CONFIGS | SHARDED_SAFETENSORS)
    hub.fetch_config("owner/name")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        FileNotFoundError, match=r"HF_HUB_OFFLINE is set and model.safetensors or .* is not in .*hub; unset"
    ):
        hub.fetch("owner/name")
    with pytest.raises(FileNotFoundError, match="config.json of 'other/name' is not in"):
        hub.fetch_config("other/name")
    with pytest.raises(FileNotFoundError, match="did you mean 'timm/resnet50.a1_in1k'"):
        hub.fetch("timm/resnet50.a1_in2k")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    (hub.fetch("owner/name") / "part-2.safetensors").unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="part-2.safetensors of 'owner/name' is not in"):
        hub.fetch("owner/name")


def test_without_a_network_the_cache_is_enough_and_the_endpoint_is_named(server, monkeypatch, no_waiting):
    put(server, "owner/name", {"config.json": b"{}"} | SAFETENSORS)
    folder = hub.fetch("owner/name")
    nowhere = "http://127.0.0.1:9"
    monkeypatch.setattr(constants, "ENDPOINT", nowhere)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", nowhere + "/{repo_id}/resolve/{revision}/{filename}")
    assert hub.fetch("owner/name") == folder
    with pytest.raises(
        FileNotFoundError, match=rf"could not be had from {nowhere} \(ConnectError.*\) .* check the conn"
    ):
        hub.fetch("other/name")


def test_failures_of_the_hub_that_pass(server, no_waiting):
    put(server, "owner/name", CONFIGS | {"model.safetensors": WEIGHTS})
    commit = server.commit("owner/name")
    server.faults["/owner/name/resolve/main/config.json"] = Fault(status=503, times=2)
    server.faults[f"/owner/name/resolve/{commit}/model.safetensors"] = Fault(cut_after=1000, times=2)
    assert content(hub.fetch("owner/name")) == CONFIGS | {"model.safetensors": WEIGHTS}


def test_failures_of_the_hub_that_stay_are_named(server, no_waiting):
    put(server, "owner/name", CONFIGS | {"model.safetensors": WEIGHTS})
    server.faults[f"/owner/name/resolve/{server.commit('owner/name')}/model.safetensors"] = Fault(cut_after=0)
    with pytest.raises(FileNotFoundError, match=r"^model.safetensors of 'owner/name' could not be had from .* check"):
        hub.fetch("owner/name")
    server.faults["/owner/other/resolve/main/config.json"] = Fault(status=503)
    with pytest.raises(FileNotFoundError, match=r"\(HfHubHTTPError: .*503"):
        hub.fetch("owner/other")


def test_redirects_are_followed_and_the_token_stays_with_the_hub(server, monkeypatch, tmp_path):
    put(server, "owner/new", CONFIGS | SAFETENSORS)
    put(server, "owner/name", CONFIGS | SAFETENSORS)
    commit = server.commit("owner/name")
    monkeypatch.setenv("HF_TOKEN", server.token)
    with Server(tmp_path / "cdn") as cdn:
        put(cdn, "blobs", SAFETENSORS)
        server.faults["/owner/name/resolve/main/config.json"] = Fault(
            redirect=f"/owner/name/resolve/{commit}/config.json"
        )
        server.faults[f"/owner/name/resolve/{commit}/model.safetensors"] = Fault(
            redirect=f"{cdn.url.replace('127.0.0.1', 'localhost')}/blobs/model.safetensors"  # another host
        )
        assert content(hub.fetch("owner/name")) == CONFIGS | SAFETENSORS
        assert all(r.headers["authorization"] == f"Bearer {server.token}" for r in server.requests if "owner" in r.path)
        assert [("authorization" in r.headers) for r in cdn.requests] == [False]


# torchvision


def test_torchvision_weights_are_downloaded_once(server, tmp_path):
    path = hub.fetch(SOURCE)
    assert path == torchvision_file(tmp_path)
    assert path.read_bytes() == WEIGHTS
    assert not list(path.parent.glob("*.incomplete"))
    assert hub.fetch(SOURCE) == path
    assert len(server.requests) == 1


def test_torchvision_weights_have_no_config_and_no_revision(server):
    with pytest.raises(ValueError, match="'torchvision/net.V1' has no config file"):
        hub.fetch_config(SOURCE)
    with pytest.raises(ValueError, match="revision='v2' was given, but torchvision's weights have none"):
        hub.fetch(SOURCE, revision="v2")


def test_torchvision_offline(server, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    file = torchvision_file(tmp_path)
    with pytest.raises(
        FileNotFoundError, match=rf"{file.name} of '{SOURCE}' is not in {file.parent}; unset it, or copy"
    ):
        hub.fetch(SOURCE)
    assert not server.requests
    part(tmp_path).with_name(file.name).write_bytes(WEIGHTS)
    assert hub.fetch(SOURCE) == file


def fault(server: Server, fault: Fault) -> str:
    path = hub.torchvision_facts()["net.V1"]["url"].removeprefix(server.url)
    server.faults[path] = fault
    return path


def ranges(server: Server) -> list[str | None]:
    return [request.headers.get("range") for request in server.requests]


def test_a_cut_download_continues(server):
    fault(server, Fault(cut_after=300_000, times=2))
    assert hub.fetch(SOURCE).read_bytes() == WEIGHTS
    assert ranges(server) == [None, "bytes=300000-", "bytes=600000-"]


@pytest.mark.parametrize("second", [Fault(ignores_range=True), Fault(wrong_range=True)], ids=["ignored", "wrong"])
def test_a_server_that_cannot_continue_starts_over(second, server, tmp_path):
    fault(server, second)
    part(tmp_path).write_bytes(WEIGHTS[:1000])
    assert hub.fetch(SOURCE).read_bytes() == WEIGHTS
    assert ranges(server)[0] == "bytes=1000-"


@pytest.mark.parametrize("have", [WEIGHTS, WEIGHTS + b"more"], ids=["complete", "too long"])
def test_a_part_that_is_no_part(have, server, tmp_path):
    part(tmp_path).write_bytes(have)
    assert hub.fetch(SOURCE).read_bytes() == WEIGHTS
    assert len(server.requests) == (1 if have == WEIGHTS else 2)


@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_failures_that_pass_are_tried_again(status, server):
    fault(server, Fault(status=status, times=4))
    assert hub.fetch(SOURCE).read_bytes() == WEIGHTS
    assert len(server.requests) == 5


def test_a_server_that_stalls_is_asked_again(server, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    fault(server, Fault(pause=0.5, times=1))
    assert hub.fetch(SOURCE).read_bytes() == WEIGHTS
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("failure", "tries", "words"),
    [
        (Fault(status=503), 5, "503"),
        (Fault(status=404), 1, "404"),
        (Fault(cut_after=0), 5, r"ended after 0 of 1048576 bytes"),
    ],
    ids=["unavailable", "gone", "cut"],
)
def test_failures_that_stay_are_named(failure, tries, words, server, tmp_path):
    fault(server, failure)
    with pytest.raises(
        FileNotFoundError, match=rf"{server.url}/models/net-.* could not be downloaded \(.*{words}.*check"
    ):
        hub.fetch(SOURCE)
    assert len(server.requests) == tries
    assert not torchvision_file(tmp_path).exists()


def test_a_host_that_is_not_there_is_named(server, monkeypatch):
    facts = {"net.V1": {"url": "http://127.0.0.1:9/net-00000000.pth", "sha256": "00000000"}}
    monkeypatch.setattr(hub, "torchvision_facts", lambda: facts)
    with pytest.raises(FileNotFoundError, match=r"http://127.0.0.1:9/net.* could not be downloaded \(.*refused.*check"):
        hub.fetch(SOURCE)


def test_redirects_of_torchvision_are_followed(server):
    put(server, "elsewhere", {"weights": WEIGHTS})
    fault(server, Fault(redirect="/elsewhere/step"))
    put(server, "elsewhere", {"step": b""})
    server.faults["/elsewhere/step"] = Fault(redirect=f"{server.url}/elsewhere/weights")
    server.faults["/elsewhere/weights"] = Fault(cut_after=1000, times=1)
    assert hub.fetch(SOURCE).read_bytes() == WEIGHTS
    assert names(server.paths("GET"))[-2:] == ["step", "weights"]
    assert ranges(server)[-1] == "bytes=1000-"


def test_other_bytes_than_torchvisions_are_refused_and_removed(server, tmp_path):
    fault(server, Fault(wrong_bytes=True, times=1))
    expected = _sha256(WEIGHTS)[:8]
    wrong = _sha256(bytes(byte ^ 1 for byte in WEIGHTS))
    with pytest.raises(CheckpointError, match=f"its SHA-256 is {wrong} and should begin with {expected}; .* try again"):
        hub.fetch(SOURCE)
    assert not list(torchvision_file(tmp_path).parent.glob("*.pth*[!k]"))
    assert hub.fetch(SOURCE).read_bytes() == WEIGHTS


# Processes

PROGRAM = """
import sys
from eqzoo.checkpoint import hub
facts = {"net.V1": {"url": sys.argv[1], "sha256": sys.argv[2]}}
hub.torchvision_facts = lambda: facts
for source in sys.argv[3:]:
    print(hub.fetch(source))
"""


def start(server: Server, home: Path, *sources: str) -> subprocess.Popen[str]:
    fact = hub.torchvision_facts()["net.V1"]
    environment = os.environ | {"HF_HOME": str(home), "HF_ENDPOINT": server.url, "HF_TOKEN": server.token}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, fact["url"], fact["sha256"], *sources],
        env=environment | {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_download_once_and_obey_the_environment(server, tmp_path):
    put(server, "owner/name", CONFIGS | SAFETENSORS)
    server.private.add("owner/name")
    fault(server, Fault(pause=0.01))
    processes = [start(server, tmp_path / "home", SOURCE, "owner/name") for _ in range(2)]
    for process in processes:
        out, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert not errors  # no progress bar was wanted
        file, folder = map(Path, out.split())
        assert file == torchvision_file(tmp_path)
        assert folder.is_relative_to(tmp_path / "home" / "hub")
        assert content(folder) == CONFIGS | SAFETENSORS
    assert torchvision_file(tmp_path).read_bytes() == WEIGHTS
    assert len([path for path in server.paths("GET") if path.startswith("/models/")]) == 1


def test_a_killed_download_leaves_no_half_file_and_continues(server, tmp_path):
    planned = Fault(pause=0.02)
    fault(server, planned)
    file, incomplete = torchvision_file(tmp_path), part(tmp_path)
    process = start(server, tmp_path / "home", SOURCE)
    try:
        while process.poll() is None and not (incomplete.exists() and incomplete.stat().st_size > 50_000):
            time.sleep(0.01)
        assert process.poll() is None, process.stderr
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert not file.exists()
    size = incomplete.stat().st_size
    assert 50_000 < size < len(WEIGHTS)
    planned.times = 0
    assert hub.fetch(SOURCE) == file
    assert file.read_bytes() == WEIGHTS
    assert ranges(server) == [None, f"bytes={size}-"]
