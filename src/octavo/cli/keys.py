"""`octavo keys`: who may use the server, and how much of it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.flags import byte_count, count

if TYPE_CHECKING:
    from octavo.api.keys import Key


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "keys",
        help="add, list and revoke API keys",
        usage="octavo keys add|list|revoke [OPTIONS]",
        description="Add, list and revoke API keys in octavo.toml. A running server takes them up by itself.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="add|list|revoke")

    add = actions.add_parser("add", usage="octavo keys add NAME [OPTIONS]", help="make a key")
    add.description = "Make a key and print it, this once: the file gets its hash."
    flag = add.add_argument
    flag("name", metavar="NAME", help="whose it is: 1 to 64 printable characters")
    flag(
        "--weight",
        type=float,
        metavar="W",
        help="its part of the machine beside others' (default: 1)",
    )
    flag(
        "--class",
        dest="of_work",
        choices=("interactive", "background"),
        help="background yields to everybody who is not (default: interactive)",
    )
    group = add.add_mutually_exclusive_group()
    group.add_argument(
        "--group", metavar="NAME", help="who shares cached content with it (default: household, as all do)"
    )
    group.add_argument("--private", action="store_true", help="nobody shares cached content with it")
    flag(
        "--kv-quota",
        type=byte_count,
        metavar="SIZE",
        help="of the KV cache, as 512MiB: others' content goes only for more (default: an equal part)",
    )
    flag("--tokens-per-minute", type=count, metavar="N", help="tokens computed for it (default: no limit)")
    flag(
        "--max-model-len",
        type=count,
        metavar="TOKENS",
        help="its longest request, prompt and answer together (default: the server's)",
    )
    flag("--admin", action="store_true", help="may use /admin")
    _add_config(add)
    add.set_defaults(act=_add)

    listing = actions.add_parser("list", usage="octavo keys list [--json]", help="show what keys there are")
    listing.add_argument("--json", action="store_true", help="print a list of objects")
    _add_config(listing)
    listing.set_defaults(act=_list)

    revoke = actions.add_parser("revoke", usage="octavo keys revoke NAME", help="refuse a key from now on")
    revoke.add_argument("name", metavar="NAME")
    _add_config(revoke)
    revoke.set_defaults(act=_revoke)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns: 0, or 1 and one sentence where the file is wrong or cannot be written."""
    from octavo.cli.config_file import default_path
    from octavo.cli.config_place import BadConfig
    from octavo.cli.keys_file import NoSuchKey

    given = os.environ.get("OCTAVO_CONFIG")  # as `octavo serve` has it
    path: Path = args.config or (Path(given) if given else default_path())
    try:
        return int(args.act(args, path))
    except (BadConfig, NoSuchKey) as error:
        sentence = str(error)
    except OSError as error:
        sentence = f"{error.filename or path} cannot be written: {error.strerror or error}"
    print(f"octavo: error: {sentence}", file=sys.stderr)
    return 1


def _add(args: argparse.Namespace, path: Path) -> int:
    from octavo.api.keys import PRIVATE, digest_of, new_key
    from octavo.cli.keys_file import add_key

    key = new_key()
    fields: dict[str, Any] = {
        "name": args.name,
        "hash": f"sha256:{digest_of(key.encode()).hex()}",
        "weight": args.weight,
        "class": args.of_work,
        "group": PRIVATE if args.private else args.group,
        "kv-quota": args.kv_quota,
        "tokens-per-minute": args.tokens_per_minute,
        "max-model-len": args.max_model_len,
        "admin": args.admin or None,
    }
    before = add_key(path, {field: value for field, value in fields.items() if value is not None})
    print(key)
    print(f"This is the key of '{args.name}', shown this once; {path} has its hash.", file=sys.stderr)
    if not before:
        print("It is the only one there: a server with this file asks everybody for a key.", file=sys.stderr)
    return 0


def _list(args: argparse.Namespace, path: Path) -> int:
    from octavo.cli.config_file import is_there, read_keys

    keys = read_keys(path) if is_there(path) else None
    if args.json:
        print(json.dumps([key.described() for key in keys or ()], indent=2))
    elif keys:
        _print_table(keys)
    elif keys is None:
        print(f"{path} has no keys: a server with this file asks for none", file=sys.stderr)
    else:
        print(f"{path} has an empty list of keys: nobody gets in", file=sys.stderr)
    return 0


def _revoke(args: argparse.Namespace, path: Path) -> int:
    from octavo.cli.keys_file import revoke_key

    before = revoke_key(path, args.name)
    print(f"'{args.name}' is refused from the next request on.", file=sys.stderr)
    if len(before) == 1:
        print(f"It was the last one of {path}: nobody gets in until another is added.", file=sys.stderr)
    return 0


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="which octavo.toml (default: ~/.config/octavo/octavo.toml, or below $XDG_CONFIG_HOME)",
    )


def _print_table(keys: tuple[Key, ...]) -> None:
    from octavo.model.available_memory import format_bytes

    rows = [("name", "weight", "class", "group", "kv quota", "tokens/min", "max len", "admin")]
    rows += [
        (
            key.name,
            f"{key.weight:g}",
            "background" if key.background else "interactive",
            key.group,
            "-" if key.kv_quota is None else format_bytes(key.kv_quota),
            "-" if key.tokens_per_minute is None else f"{key.tokens_per_minute:,}",
            "-" if key.max_model_len is None else f"{key.max_model_len:,}",
            "yes" if key.admin else "no",
        )
        for key in keys
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
