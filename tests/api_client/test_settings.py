"""Which layer wins, and that every wrong setting is named."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import pytest
from msgspec import Meta

from chairlift_client.errors import ConfigError
from chairlift_client.settings import find_file, load_settings


class Example(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: str = "redis://localhost"
    model: str
    block_size: Annotated[int, Meta(ge=1, le=256)] = 16
    ratio: float = 0.5
    verbose: bool = False
    names: tuple[str, ...] = ()
    limit: int | None = None
    api_password: str = ""

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < self.block_size:
            raise ValueError(f"limit {self.limit} is less than block_size {self.block_size}")


def toml(folder: Path, text: str) -> Path:
    path = folder / "chairlift.toml"
    path.write_text(text)
    return path


def test_flags_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    path = toml(
        tmp_path, 'model = "file"\nblock_size = 8\nratio = 1\n[worker]\nblock_size = 32\nverbose = true\n'
    )
    environ = {"CHAIRLIFT_MODEL": "env", "CHAIRLIFT_RATIO": "0.25", "HOME": "/"}
    flags = {"model": "flag", "block_size": None}
    assert load_settings(Example, flags, environ, path, section="worker") == Example(
        model="flag", block_size=32, ratio=0.25, verbose=True
    )


def test_the_environment_is_text_of_any_type() -> None:
    environ = {
        "CHAIRLIFT_MODEL": "m",
        "CHAIRLIFT_BLOCK_SIZE": "64",
        "CHAIRLIFT_VERBOSE": "true",
        "CHAIRLIFT_NAMES": "a, b,c",
        "CHAIRLIFT_LIMIT": "null",
    }
    assert load_settings(Example, {}, environ, None) == Example(
        model="m", block_size=64, verbose=True, names=("a", "b", "c"), limit=None
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'model = "m"\nblok_size = 8',
            r"unknown setting `blok_size` in .*chairlift.toml; did you mean `block_size`",
        ),
        ('model = "m"\n[worker]\nzzz = 8', r"unknown setting `zzz` in .*\[worker\]; known are: .*block_size"),
        ('model = "m"\nblock_size = 0', r"block_size = 0: Expected `int` >= 1"),
        ('model = "m"\nblock_size = "8"', r"block_size = '8': Expected `int`, got `str`"),
        ("block_size = 8", r"missing settings: model \(--model or CHAIRLIFT_MODEL\)"),
        ('model = "m"\nlimit = 3', "limit 3 is less than block_size 16"),
        ("model = \n[x]", "not valid TOML.*line 1"),
        ("worker = 3", r"has to be a table"),
    ],
)
def test_mistakes_in_the_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(Example, {}, {}, toml(tmp_path, text), section="worker")


def test_other_commands_tables_are_left_alone(tmp_path: Path) -> None:
    path = toml(tmp_path, 'model = "m"\n[nightly]\nanything = 1\n')
    assert load_settings(Example, {}, {}, path).model == "m"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"CHAIRLIFT_BLOCKSIZE": "8"}, "unknown setting `CHAIRLIFT_BLOCKSIZE`.*mean `CHAIRLIFT_BLOCK_SIZE`"),
        ({"CHAIRLIFT_ZZZ": "8"}, "unknown setting `CHAIRLIFT_ZZZ`"),
        ({"CHAIRLIFT_BLOCK_SIZE": "many"}, "CHAIRLIFT_BLOCK_SIZE: block_size = 'many': Expected `int`"),
    ],
)
def test_mistakes_in_the_environment(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(Example, {"model": "m"}, environ, None)


def test_a_shared_environment_is_refused_only_where_it_looks_misspelled() -> None:
    flags = {"model": "m"}
    environ = {
        "CHAIRLIFT_ZZZ": "1",
        "CHAIRLIFT_PORT": "tcp://10.0.0.1:80",
        "CHAIRLIFT_SERVICE_HOST": "10.0.0.1",
    }
    assert load_settings(Example, flags, environ, None, shared=True).model == "m"
    with pytest.raises(ConfigError, match="CHAIRLIFT_MODELS"):
        load_settings(Example, flags, {"CHAIRLIFT_MODELS": "x"}, None, shared=True)


def test_a_shared_file_is_refused_only_where_it_looks_misspelled(tmp_path: Path) -> None:
    path = toml(tmp_path, 'model = "m"\nzzz = 1\n')
    assert load_settings(Example, {}, {}, path, shared=True).model == "m"
    with pytest.raises(ConfigError, match="zzz"):
        load_settings(Example, {}, {}, path)
    with pytest.raises(ConfigError, match=r"blocksize.*did you mean `block_size`"):
        load_settings(Example, {}, {}, toml(tmp_path, 'model = "m"\nblocksize = 1\n'), shared=True)


def test_variables_of_a_kubernetes_service_are_no_settings() -> None:
    environ = {
        "CHAIRLIFT_SERVICE_HOST": "10.0.0.1",
        "CHAIRLIFT_SERVICE_PORT": "80",
        "CHAIRLIFT_SERVICE_PORT_HTTP": "80",
        "CHAIRLIFT_PORT": "tcp://10.0.0.1:80",
        "CHAIRLIFT_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    assert load_settings(Example, {"model": "m"}, environ, None).model == "m"


def test_mistakes_in_the_flags() -> None:
    with pytest.raises(ConfigError, match="unknown setting `modle` in the flags; did you mean `model`"):
        load_settings(Example, {"modle": "m"}, {}, None)
    with pytest.raises(ConfigError, match="--block-size: block_size = 1000: Expected `int` <= 256"):
        load_settings(Example, {"model": "m", "block_size": 1000}, {}, None)


def test_secrets_stay_out_of_messages(tmp_path: Path) -> None:
    path = toml(tmp_path, 'model = "m"\nurl = ["redis://:hunter2@host"]\n')
    for environ, file in (({}, path), ({"CHAIRLIFT_API_PASSWORDS": "hunter2"}, None)):
        with pytest.raises(ConfigError) as caught:
            load_settings(Example, {"model": "m"}, environ, file)
        assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        load_settings(Example, {"model": "m", "block_size": "redis://:hunter2@host:1"}, {}, None)
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        load_settings(Example, {"model": "m", "api_password": 17}, {}, None)
    assert "17" not in str(caught.value)


def test_finding_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_file(None, {}) is None
    toml(tmp_path, "")
    assert find_file(None, {}) == Path("chairlift.toml")
    assert find_file(None, {"CHAIRLIFT_CONFIG": "other.toml"}) == Path("other.toml")
    assert find_file("flag.toml", {"CHAIRLIFT_CONFIG": "other.toml"}) == Path("flag.toml")
    with pytest.raises(ConfigError, match=r"cannot read the configuration file flag.toml: No such file"):
        load_settings(Example, {"model": "m"}, {}, Path("flag.toml"))
