"""Which keys are valid, and whose account and group they are."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from collections.abc import Mapping

import pytest

from api.keys_of_a_house import Source, key
from octavo.api.keys import HOUSEHOLD, PRIVATE, Key, Keyring, LiveKey, digest_of, new_key


def found(keyring: Keyring, secret: str) -> str | None:
    live = keyring.find(secret.encode())
    return live and live.settings.name


def test_a_new_key_has_256_random_bits_and_never_comes_twice() -> None:
    made = {new_key() for _ in range(100)}
    assert len(made) == 100
    assert all(re.fullmatch(r"octavo-[A-Za-z0-9_-]{43}", one) for one in made)


def test_a_key_is_known_by_its_sha256() -> None:
    assert digest_of(b"octavo-1") == hashlib.sha256(b"octavo-1").digest()


def test_the_right_key_is_found_and_no_other() -> None:
    keyring = Keyring(Source(key("anna"), key("ben")), flag_key=Key.of_flag("sesame"))
    assert found(keyring, "key of anna") == "anna"
    assert found(keyring, "key of ben") == "ben"
    assert found(keyring, "sesame") == "api-key"
    for wrong in ("", "key of ann", "key of anna ", "anna", digest_of(b"key of anna").hex()):
        assert found(keyring, wrong) is None


@pytest.mark.parametrize("secret", ["key of anna", "key of ben", "key of cleo", "nobody's"])
def test_every_key_is_compared_whichever_was_sent(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    constant_time = hmac.compare_digest

    def compare_digest(one: bytes, other: bytes) -> bool:
        compared.append(len(one))
        return constant_time(one, other)

    monkeypatch.setattr(hmac, "compare_digest", compare_digest)
    Keyring(Source(key("anna"), key("ben"), key("cleo"))).find(secret.encode())
    assert compared == [32, 32, 32]


def test_groups_and_accounts_of_different_keys_are_never_equal_by_accident() -> None:
    anna = key("anna", group=PRIVATE)
    same_name_later = key("anna", "another", group=PRIVATE)
    own_group = anna.sharing_group
    names = [HOUSEHOLD, PRIVATE, "", own_group, anna.digest.hex(), f"key:{anna.digest.hex()}", "key:anna"]
    groups = {key("ben", group=name).sharing_group for name in names if name not in (HOUSEHOLD, PRIVATE)}
    assert own_group not in groups
    assert same_name_later.sharing_group != own_group
    assert key("ben", group=PRIVATE).sharing_group != own_group
    assert key("ben").sharing_group == "" != own_group
    assert key("ben", group="flat").sharing_group == key("cleo", group="flat").sharing_group != ""
    assert key("anna").account != key("ben").account
    assert not key("anna").account.startswith("address:")


def test_what_is_told_of_a_key_holds_no_hash() -> None:
    told = key("anna", weight=2.0, background=True, kv_quota=5).described()
    assert told == {
        "name": "anna",
        "weight": 2.0,
        "class": "background",
        "group": "household",
        "kv_quota": 5,
        "tokens_per_minute": None,
        "max_model_len": None,
        "admin": False,
    }


def test_keys_come_and_go_while_the_server_runs() -> None:
    source = Source(key("anna"))
    keyring = Keyring(source)
    source.keys = (key("ben"),)
    assert found(keyring, "key of ben") is None, "nobody has looked yet"
    keyring.refresh()
    assert (found(keyring, "key of anna"), found(keyring, "key of ben")) == (None, "ben")


def test_a_server_that_asks_for_keys_goes_on_asking(caplog: pytest.LogCaptureFixture) -> None:
    source = Source(key("anna"))
    keyring = Keyring(source)
    for silent in (None, ()):
        source.keys = silent
        keyring.refresh()
        assert keyring.keyed
        assert keyring.live == ()
        assert found(keyring, "key of anna") is None
    assert "nobody gets in" in caplog.text


def test_an_open_server_closes_when_the_first_key_is_written() -> None:
    source = Source()
    source.keys = source._seen = None
    keyring = Keyring(source)
    assert not keyring.keyed
    keyring.refresh()
    assert not keyring.keyed
    source.keys = (key("anna"),)
    keyring.refresh()
    assert keyring.keyed
    assert found(keyring, "key of anna") == "anna"


def test_an_empty_list_of_keys_admits_nobody_from_the_start(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert Keyring(Source()).keyed
    assert "nobody gets in" in caplog.text
    assert found(Keyring(Source(), flag_key=Key.of_flag("sesame")), "sesame") == "api-key"


def test_what_a_key_has_used_stays_used_when_the_file_changes() -> None:
    source = Source(key("anna", tokens_per_minute=600), key("ben"))
    keyring = Keyring(source)
    anna = keyring.find(b"key of anna")
    assert anna is not None
    assert anna.bucket is not None
    anna.bucket.charge(500)

    def anna_now() -> LiveKey:
        keyring.refresh()
        live = keyring.find(b"key of anna")
        assert live is not None
        return live

    source.keys = (key("anna", tokens_per_minute=600, max_model_len=300),)
    bucket = anna_now().bucket
    assert anna_now().settings.max_model_len == 300
    assert bucket is not None
    assert 100 <= bucket.remaining < 200
    source.keys = (key("anna", tokens_per_minute=6000),)
    bucket = anna_now().bucket
    assert bucket is not None
    assert bucket.limit == 6000
    assert bucket.remaining < 1000
    source.keys = (key("anna"),)
    assert anna_now().bucket is None


def test_quotas_are_told_at_once_and_when_they_change() -> None:
    source = Source(key("anna", kv_quota=1000), key("ben"))
    keyring = Keyring(source)
    told: list[dict[str, int]] = []

    def listen(quotas: Mapping[str, int]) -> None:
        told.append(dict(quotas))

    keyring.tell_quotas(listen)
    assert told == [{"key:anna": 1000}]
    source.keys = (*(source.keys or ()), key("cleo"))
    keyring.refresh()
    assert len(told) == 1
    source.keys = (key("ben", kv_quota=7),)
    keyring.refresh()
    source.keys = ()
    keyring.refresh()
    assert told[1:] == [{"key:ben": 7}, {}]
    Keyring(Source(key("ben"))).tell_quotas(lambda _: told.append({"never": 0}))
    assert len(told) == 3
