"""[[keys]] of octavo.toml: what they may say, and the sentence for everything else."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from octavo.api.keys import HOUSEHOLD, Key
from octavo.cli.config_file import ConfigFile, default_path, is_there, read_keys
from octavo.cli.config_place import BadConfig

A, B = (hashlib.sha256(secret).hexdigest() for secret in (b"a", b"b"))


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "octavo.toml"
    path.write_text(text, encoding="utf-8")
    return path


def entry(name: str, digest: str, *lines: str) -> str:
    return "\n".join(("[[keys]]", f'name = "{name}"', f'hash = "sha256:{digest}"', *lines, ""))


def test_everything_a_key_may_say(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        entry(
            "Änne 2",
            A.upper(),
            "weight = 2.5",
            'class = "background"',
            'group = "private"',
            'kv-quota = "512MiB"',
            "tokens-per-minute = 20000",
            "max-model-len = 4096",
            "admin = true",
        )
        + entry("ben", B, "weight = 1000", "kv-quota = 7", 'group = ""'),
    )
    assert read_keys(path) == (
        Key(
            "Änne 2",
            hashlib.sha256(b"a").digest(),
            weight=2.5,
            background=True,
            group="private",
            kv_quota=512 << 20,
            tokens_per_minute=20_000,
            max_model_len=4096,
            admin=True,
        ),
        Key("ben", hashlib.sha256(b"b").digest(), weight=1000.0, group=HOUSEHOLD, kv_quota=7),
    )
    assert ConfigFile.read(path) == ConfigFile(), "the rest of the file says nothing"


def test_no_word_of_keys_is_another_thing_than_no_keys(tmp_path: Path) -> None:
    assert read_keys(written(tmp_path, "[kv-cache]")) is None
    assert read_keys(written(tmp_path, "keys = []")) == ()
    assert read_keys(written(tmp_path, f'keys = [{{name = "a", hash = "sha256:{A}"}}]')) is not None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("keys = 3", "'keys' must be a list of tables, not int"),
        ("keys = ['a']", r"'keys\[0\]' must be a table, not str"),
        ("[[key]]", "'key' means nothing here; there is keys, kv-cache"),
        ("[[keys]]", r"'keys\[0\].name' must be text, not NoneType"),
        ("[[keys]]\nname = 'a'", r"'keys\[0\].hash' must be text, not NoneType"),
        ("[[keys]]\nname = ''", "'keys\\[0\\].name' must have from 1 to 64 characters, not 0"),
        (f"[[keys]]\nname = '{'x' * 65}'", "from 1 to 64 characters, not 65"),
        ('[[keys]]\nname = "a\\nb"', r"must be printable.* not 'a\\nb'"),
        ("[[keys]]\nname = ' a'", "without spaces at its ends"),
        (entry("api-key", A), "must not be 'api-key', which is the key that --api-key gives"),
        (entry("a", A) + entry("a", B), r"keys\[1\].name is 'a', and so is keys\[0\].name"),
        (entry("a", A) + entry("b", A.upper()), r"keys\[1\].hash is that of keys\[0\], 'a', too"),
        (entry("a", "abc"), "'sha256:' and 64 hexadecimal digits, 71 characters, and has 10"),
        ("[[keys]]\nname = 'a'\nhash = 'octavo-secret'", "and has 13; 'octavo keys add NAME' makes"),
        (entry("a", hashlib.sha256(b"").hexdigest()), "no key at all: everybody would get in"),
        (
            entry("a", A, "weight = 0"),
            r"'keys\[0\].weight' must be a number above 0 and at most 1,000, not 0",
        ),
        (entry("a", A, "weight = 1000.5"), "at most 1,000, not 1000.5"),
        (entry("a", A, "weight = -1"), "not -1"),
        (entry("a", A, "weight = nan"), "not nan"),
        (entry("a", A, "weight = inf"), "not inf"),
        (entry("a", A, "weight = true"), "must be a number, not bool"),
        (entry("a", A, "weight = '2'"), "must be a number, not str"),
        (entry("a", A, f"weight = 0x{'f' * 5000}"), "at most 1,000, not one of 20,000 bits"),
        (entry("a", A, "class = 'fast'"), "must be interactive or background, not 'fast'"),
        (entry("a", A, "class = 1"), "class' must be text, not int"),
        (entry("a", A, f"group = '{'g' * 70}'"), "group' must have from 1 to 64 characters, not 70"),
        (entry("a", A, "kv-quota = 0"), "kv-quota' must be from 1 to 9223372036854775807, not 0"),
        (entry("a", A, "kv-quota = 'lots'"), "'lots' is not a size such as 2GiB"),
        (entry("a", A, "kv-quota = '0MiB'"), "must be from 1 to 9223372036854775807, not 0"),
        (entry("a", A, f"kv-quota = '{'9' * 30}TiB'"), "from 1 to 9223372036854775807"),
        (entry("a", A, "kv-quota = 1.5"), "must be a whole number, not float"),
        (entry("a", A, "tokens-per-minute = 0"), "tokens-per-minute' must be from 1"),
        (entry("a", A, "tokens-per-minute = true"), "must be a whole number, not bool"),
        (entry("a", A, "max-model-len = -4"), "max-model-len' must be from 1 .* not -4"),
        (entry("a", A, "admin = 1"), "admin' must be true or false, not int"),
        (entry("a", A, "clas = 2"), r"'keys\[0\].clas' means nothing here; there is name, hash, weight"),
        (entry("a", A, f"max-model-len = 0x{'f' * 5000}"), "must be from 1 .*, not one of 20,000 bits"),
        (entry("a", A, f"kv-quota = '{'9' * 5000}GiB'"), "has 5,003 characters and is not a size"),
        (entry("a", A, f"tokens-per-minute = {'9' * 5000}"), "is not TOML: .*digits"),
        (f"keys = {'[' * 50_000}", "is nested too deeply to be read"),
        (entry("a", A) + "[keys.more]\n", r"'keys\[0\].more' means nothing here"),
    ],
)
def test_what_nobody_can_follow_is_named_with_its_place(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=said) as refusal:
        read_keys(written(tmp_path, text))
    assert "octavo.toml" in str(refusal.value)
    assert len(str(refusal.value)) < 500


def test_a_key_of_the_file_may_not_be_that_of_the_flag(tmp_path: Path) -> None:
    path = written(tmp_path, entry("anna", A))
    with pytest.raises(BadConfig, match=r"keys\[0\].hash is that of the key that --api-key gives"):
        read_keys(path, (Key.of_flag("a"),))
    assert read_keys(path, (Key.of_flag("b"),)) is not None


def test_where_the_file_lies_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert default_path() == tmp_path / "octavo" / "octavo.toml"
    monkeypatch.setenv("HOME", str(tmp_path))
    for relative in ("", "here"):
        monkeypatch.setenv("XDG_CONFIG_HOME", relative)
        assert default_path() == tmp_path / ".config" / "octavo" / "octavo.toml"


def test_a_file_is_not_there_only_if_there_is_none(tmp_path: Path) -> None:
    assert not is_there(tmp_path / "gone" / "octavo.toml")
    assert not is_there(written(tmp_path, "") / "octavo.toml")
    assert is_there(written(tmp_path, ""))
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert is_there(loop), "it cannot be looked at, so it must not be taken for none"
