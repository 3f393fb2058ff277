"""`octavo keys`: one key shown once, and a file that stays as its owner wrote it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.cli.config_file import read_keys
from octavo.cli.keys_file import _with, _without, add_key
from octavo.cli.main import main

HOUSE = """# The house

# What everybody begins with
[[kv-cache.pinned-prefixes]]   # the first
text = "You   are kind."  # and so on
cache-salt = 'kitchen'
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "octavo.toml"


def keys(path: Path, *arguments: str) -> int:
    return main(["keys", *arguments, "--config", str(path)])


def names(path: Path) -> list[str]:
    return [key.name for key in read_keys(path) or ()]


def test_a_key_is_printed_once_and_only_its_hash_is_kept(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keys(path, "add", "anna") == 0
    said = capsys.readouterr()
    assert re.fullmatch(r"octavo-[A-Za-z0-9_-]{43}\n", said.out), "a script takes standard output as it is"
    secret = said.out.strip()
    assert f'hash = "sha256:{hashlib.sha256(secret.encode()).hexdigest()}"' in path.read_text()
    assert secret not in path.read_text()
    assert secret.removeprefix("octavo-") not in said.err
    assert "shown this once" in said.err
    assert "asks everybody for a key" in said.err
    assert keys(path, "list") == 0
    listed = capsys.readouterr().out
    assert "anna" in listed
    assert hashlib.sha256(secret.encode()).hexdigest()[:16] not in listed
    assert keys(path, "add", "ben") == 0
    assert "everybody" not in capsys.readouterr().err


def test_every_option_gets_into_the_file_and_back_out(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--weight 2.5 --class background --group flat --kv-quota 512MiB --tokens-per-minute 20000"
    assert keys(path, "add", "anna", *options.split(), "--max-model-len", "4096", "--admin") == 0
    assert keys(path, "add", "ben", "--private") == 0
    assert keys(path, "add", "cleo") == 0
    capsys.readouterr()
    assert keys(path, "list", "--json") == 0
    anna, ben, cleo = json.loads(capsys.readouterr().out)
    assert anna == {
        "name": "anna",
        "weight": 2.5,
        "class": "background",
        "group": "flat",
        "kv_quota": 512 << 20,
        "tokens_per_minute": 20_000,
        "max_model_len": 4096,
        "admin": True,
    }
    assert (ben["group"], cleo["group"]) == ("private", "household")
    assert set(tomllib.loads(path.read_text())["keys"][2]) == {"name", "hash"}, "defaults are not written out"
    assert keys(path, "list") == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table] == ["name", "anna", "ben", "cleo"]
    assert "512.0 MiB" in table[1]


def test_comments_and_order_of_the_file_survive(path: Path) -> None:
    path.write_text(HOUSE)
    assert keys(path, "add", "anna") == 0
    assert path.read_text().startswith(HOUSE)
    for name in ("ben", "cleo"):
        assert keys(path, "add", name) == 0
    text = path.read_text()
    for name in ("ben", "cleo"):
        text = text.replace(
            f'[[keys]]\nname = "{name}"', f'# About {name}.\n[[keys]]  # of {name}\nname = "{name}"'
        )
    text += "\n# The end\n"
    path.write_text(text)
    assert keys(path, "add", "dora", "--weight", "3") == 0
    doras = r'\n\[\[keys\]\]\nname = "dora"\nhash = ".*"\nweight = 3.0\n'
    assert re.sub(doras, "", path.read_text()) == text
    assert names(path) == ["anna", "ben", "cleo", "dora"]
    assert keys(path, "revoke", "ben") == 0
    assert names(path) == ["anna", "cleo", "dora"]
    after = path.read_text()
    assert after.startswith(HOUSE)
    for comment in ("# About ben.", "# About cleo.\n[[keys]]  # of cleo", "# The end"):
        assert comment in after
    assert "# of ben" not in after
    assert keys(path, "revoke", "anna") == 0
    assert "# About cleo.\n[[keys]]  # of cleo" in path.read_text()


def test_a_comment_above_the_next_table_stays_above_it(path: Path) -> None:
    path.write_text(f'[[keys]]\nname = "a"\nhash = "sha256:{"0" * 64}"\n\n{HOUSE}')
    assert keys(path, "add", "anna") == 0
    assert path.read_text().endswith(HOUSE)
    assert keys(path, "revoke", "anna") == 0
    assert path.read_text().endswith(HOUSE)
    assert names(path) == ["a"]


@pytest.mark.parametrize("before", ["", "[[keys]]", HOUSE])
def test_when_the_last_key_has_gone_the_file_says_that_nobody_gets_in(
    path: Path, before: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if before == "[[keys]]":  # keys first, tables behind them
        assert keys(path, "add", "anna") == 0
        path.write_text(path.read_text() + "\n" + HOUSE)
    else:
        path.write_text(before)
        assert keys(path, "add", "anna") == 0
    assert keys(path, "revoke", "anna") == 0
    assert "nobody gets in" in capsys.readouterr().err
    assert read_keys(path) == ()
    content = tomllib.loads(path.read_text())
    assert content.pop("keys") == []
    assert content == tomllib.loads(HOUSE if before else "")
    assert keys(path, "list") == 0
    assert "nobody gets in" in capsys.readouterr().err
    assert keys(path, "add", "ben") == 0
    assert names(path) == ["ben"]
    if before:
        assert HOUSE.strip() in path.read_text()


def test_keys_written_as_inline_tables_are_edited_too(path: Path) -> None:
    digest = "1" * 64
    path.write_text(f'keys = [\n  {{name = "a", hash = "sha256:{digest}"}},  # first\n]\n[kv-cache]\n')
    assert keys(path, "add", "anna", "--weight", "2") == 0
    assert names(path) == ["a", "anna"]
    assert "# first" in path.read_text()
    assert keys(path, "revoke", "a") == 0
    assert names(path) == ["anna"]
    assert keys(path, "revoke", "anna") == 0
    assert read_keys(path) == ()


def test_a_new_file_is_for_its_owner_and_an_old_one_keeps_its_mode(path: Path) -> None:
    new = path.parent / "new" / "octavo.toml"
    assert keys(new, "add", "anna") == 0
    assert stat.S_IMODE(new.stat().st_mode) == 0o600
    assert stat.S_IMODE(new.parent.stat().st_mode) == 0o700
    for mode in (0o640, 0o644):
        new.chmod(mode)
        assert keys(new, "add", f"key {mode}") == 0
        assert stat.S_IMODE(new.stat().st_mode) == mode
    assert [entry.name for entry in new.parent.iterdir()] == ["octavo.toml"], "nothing is left lying about"


def test_lines_end_as_they_did(path: Path) -> None:
    path.write_bytes(HOUSE.replace("\n", "\r\n").encode())
    assert keys(path, "add", "anna") == 0
    assert keys(path, "add", "ben") == 0
    assert keys(path, "revoke", "anna") == 0
    written = path.read_bytes()
    assert written.count(b"\n") == written.count(b"\r\n") > HOUSE.count("\n")
    assert names(path) == ["ben"]


def test_a_link_goes_on_pointing_at_the_file(path: Path, tmp_path: Path) -> None:
    real = tmp_path / "dotfiles" / "octavo.toml"
    real.parent.mkdir()
    real.write_text(HOUSE)
    path.symlink_to(real)
    assert keys(path, "add", "anna") == 0
    assert path.is_symlink()
    assert names(real) == ["anna"]


def test_the_file_is_replaced_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(HOUSE)

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    assert keys(path, "add", "anna") == 1
    assert path.read_text() == HOUSE
    assert [entry.name for entry in path.parent.iterdir()] == ["octavo.toml"]


def test_two_who_write_at_once_lose_nothing(path: Path) -> None:
    def add(number: int) -> None:
        add_key(path, {"name": f"key {number}", "hash": f"sha256:{number:064x}"})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(1, 25)))
    assert sorted(names(path)) == sorted(f"key {number}" for number in range(1, 25))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("add", "anna"), r"keys\[1\].name is 'anna', and so is keys\[0\].name"),
        (("add", "api-key"), "must not be 'api-key'"),
        (("add", ""), "from 1 to 64 characters, not 0"),
        (("add", "x" * 65), "not 65"),
        (("add", "ben", "--weight", "0"), "above 0 and at most 1,000, not 0.0"),
        (("add", "ben", "--weight", "nan"), "not nan"),
        (("revoke", "ben"), "has no key named 'ben'; there is 'anna'"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(
    path: Path, arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keys(path, "add", "anna") == 0
    before = path.read_text()
    capsys.readouterr()
    assert keys(path, *arguments) == 1
    refused = capsys.readouterr()
    assert refused.out == "", "no key is shown that does not open anything"
    assert re.search(said, refused.err)
    assert refused.err.count("\n") == 1
    assert path.read_text() == before


@pytest.mark.parametrize("text", ["[kv-cache", "port = 1", "[[keys]]\nname = 'x'", "keys = 1"])
@pytest.mark.parametrize("arguments", [("add", "anna"), ("list",), ("revoke", "anna")])
def test_a_file_that_is_wrong_is_told_and_left_alone(
    path: Path, text: str, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    path.write_text(text)
    assert keys(path, *arguments) == 1
    assert "octavo.toml" in capsys.readouterr().err
    assert path.read_text() == text


def test_the_default_file_is_that_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(["keys", "add", "anna"]) == 0
    assert names(tmp_path / "octavo" / "octavo.toml") == ["anna"]
    monkeypatch.setenv("OCTAVO_CONFIG", str(tmp_path / "other.toml"))
    assert main(["keys", "add", "ben"]) == 0
    assert names(tmp_path / "other.toml") == ["ben"]


def test_without_a_file_there_are_no_keys(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keys(path, "list", "--json") == 0
    assert json.loads(capsys.readouterr().out) == []
    assert keys(path, "list") == 0
    assert "has no keys" in capsys.readouterr().err
    assert not path.exists()


def test_revoking_makes_neither_a_file_nor_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keys(tmp_path / "gone" / "octavo.toml", "revoke", "anna") == 1
    assert "has no key named 'anna'; there is no such file" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [[], ["add"], ["sing"], ["add", "a", "--group", "b", "--private"], ["add", "a", "--class", "c"]],
)
def test_a_wrong_command_line_is_2_and_a_usage_line(arguments: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "octavo.cli.main", "keys", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("usage: octavo keys")


LINES = st.lists(
    st.sampled_from(["", "# a note", "#", "  # indented"]),
    max_size=3,
).map(lambda lines: "".join(f"{line}\n" for line in lines))
OTHER = st.sampled_from(["", "[kv-cache]\n# inside\npinned-prefixes = []\n", HOUSE])


@settings(max_examples=200)
@given(
    head=LINES,
    ahead=OTHER,
    between=st.lists(LINES, min_size=1, max_size=4),
    behind=OTHER,
    gone=st.integers(0, 3),
    last_newline=st.booleans(),
)
def test_whatever_lies_between_keys_survives_both(
    head: str, ahead: str, between: list[str], behind: str, gone: int, last_newline: bool
) -> None:
    """Comments keep their words and their order; tables and keys mean what they meant."""
    if ahead and behind:
        behind = ""
    text = head + ahead + "\n"
    for number, lines in enumerate(between):
        text += f'[[keys]]\nname = "key {number}"\nhash = "sha256:{number:064x}"\n{lines}'
    text += behind
    text = text if last_newline else text.rstrip("\n")
    content = tomllib.loads(text)

    added = _with(text, {"name": "anna", "hash": f"sha256:{99:064x}"})
    now = tomllib.loads(added)
    assert now["keys"] == [*content["keys"], {"name": "anna", "hash": f"sha256:{99:064x}"}]
    assert {**now, "keys": 0} == {**content, "keys": 0}
    assert _comments(added) == _comments(text)

    gone %= len(between)
    less = _without(text, gone)
    now = tomllib.loads(less)
    assert now["keys"] == content["keys"][:gone] + content["keys"][gone + 1 :]
    assert {**now, "keys": 0} == {**content, "keys": 0}
    assert _comments(less.replace("  # nobody gets in", "")) == _comments(text)


def _comments(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip().startswith("#")]
