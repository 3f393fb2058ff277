"""octavo.toml: what it may say, and the sentence for everything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.cli.config_file import ConfigFile, PinnedPrefix
from octavo.cli.config_place import BadConfig


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "octavo.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_prefixes_in_the_file_and_beside_it(tmp_path: Path) -> None:
    (tmp_path / "house.txt").write_text("You help.", encoding="utf-8")
    path = written(
        tmp_path,
        """
        [[kv-cache.pinned-prefixes]]
        system-file = "house.txt"
        cache-salt = "kitchen"
        [[kv-cache.pinned-prefixes]]
        text = "Once upon a time"
        """,
    )
    assert ConfigFile.read(path).pinned_prefixes == (
        PinnedPrefix("You help.", system=True, cache_salt="kitchen"),
        PinnedPrefix("Once upon a time", system=False, cache_salt=""),
    )


@pytest.mark.parametrize("text", ["", "[kv-cache]", "[kv-cache]\npinned-prefixes = []"])
def test_an_empty_file_says_nothing(text: str, tmp_path: Path) -> None:
    assert ConfigFile.read(written(tmp_path, text)) == ConfigFile()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[kv-cache", "is not TOML"),
        ("port = 1", "'port' means nothing here; there is keys, kv-cache"),
        ("kv-cache = 3", "'kv-cache' must be a table, not int"),
        ("[kv-cache]\npins = 1", "'kv-cache.pins' means nothing here; there is pinned-prefixes"),
        ("[kv-cache]\npinned-prefixes = 'a'", "'kv-cache.pinned-prefixes' must be a list of tables, not str"),
        ("[kv-cache]\npinned-prefixes = ['a']", r"'kv-cache.pinned-prefixes\[0\]' must be a table, not str"),
        ("[[kv-cache.pinned-prefixes]]", r"pinned-prefixes\[0\] needs one of .*, and has 0 of them"),
        ("[[kv-cache.pinned-prefixes]]\ntext='a'\nsystem='b'", "needs one of .*, and has 2 of them"),
        ("[[kv-cache.pinned-prefixes]]\ntext=1", r"pinned-prefixes\[0\].text' must be text, not int"),
        ("[[kv-cache.pinned-prefixes]]\ntext=''", r"pinned-prefixes\[0\].text is empty"),
        (
            "[[kv-cache.pinned-prefixes]]\ntext-file='gone'",
            r"text-file: .*gone cannot be read: .*No such file",
        ),
        (
            "[[kv-cache.pinned-prefixes]]\ntext='a'\nsalt='b'",
            r"pinned-prefixes\[0\].salt' means nothing here",
        ),
    ],
)
def test_what_nobody_can_follow_is_named(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=said) as refusal:
        ConfigFile.read(written(tmp_path, text))
    assert "octavo.toml" in str(refusal.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"gone.toml cannot be read: No such file"):
        ConfigFile.read(tmp_path / "gone.toml")
