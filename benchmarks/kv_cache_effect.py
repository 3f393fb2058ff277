"""What each type of KV cache costs in fidelity: our logits against float64, with a short and a long context.

    python benchmarks/kv_cache_effect.py [--model M] [--dtypes f16,q8] [--json | --markdown]

1,200 tokens of real text (`tests/oracle/real_text.py`), measured twice: as a text of their own (short), and
behind the 3,152 tokens that stand before them (long). Printed for each type: mean and largest
KL(float64 || ours) in nats and how often the most likely token is the same; then the same for the other types
with the first one in the place of float64. `tests/oracle/test_kv_cache_effect.py` holds
bounds on this measurement. The float64 forward takes one to two minutes; the user's cache remembers it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from comparison import kv_dtypes, markdown_row
from octavo.bench.machine import Machine
from octavo.kernels import available_instruction_sets
from octavo.kernels.threads import default_num_threads
from octavo.kv.layout import KV_DTYPES
from octavo.model.catalog import DEFAULT_MODEL, resolve_model
from octavo.model.config import ModelConfig
from octavo.model.errors import ModelFileError
from octavo.model.gguf import GGUFFile
from octavo.text.tokenizer import Tokenizer

# The float64 forward, the text and the measurement are the tests' own: what is printed is what they hold.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from oracle.fidelity import CONTEXT, POSITIONS, Fidelity, KVCacheEffect, short_and_long
from oracle.real_text import real_tokens

Effects = Mapping[str, Sequence[KVCacheEffect]]
"""By context: each type of cache."""

WHERE = {
    "short": f"positions 0 to {POSITIONS - 1:,}",
    "long": f"positions {CONTEXT - POSITIONS:,} to {CONTEXT - 1:,}",
}


def main() -> int:
    parser = argparse.ArgumentParser(description="What each type of KV cache costs in fidelity.")
    flag = parser.add_argument
    flag("--model", default=DEFAULT_MODEL, help="a GGUF file, or a name 'octavo pull' knows")
    flag("--dtypes", type=kv_dtypes, default=KV_DTYPES, help="types of KV cache (default: f16,q8)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print the table as docs/kv-cache.md has it")
    args = parser.parse_args()
    try:
        path = resolve_model(args.model)
        tokens = _tokens(path)
    except ModelFileError as fault:
        print(fault, file=sys.stderr)
        return 2

    machine = Machine.now(default_num_threads(), available_instruction_sets()[0])
    effects = short_and_long(path, tokens, args.dtypes)
    if args.json:
        print(_json(machine, path, effects))
        return 0
    header, *rows = _rows(effects)
    if args.markdown:
        print(markdown_row(header), "|---" * len(header) + "|", sep="\n")
        print(*map(markdown_row, rows), sep="\n", end="\n\n")
    else:
        table = Table(*header, title=path.name)
        for row in rows:
            table.add_row(*row)
        Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(table)
    print(f"{machine.describe()}; the text is Python {machine.python}'s")
    return 0


def _tokens(path: Path) -> list[int]:
    """Raises: ModelFileError for a file whose architecture or context this cannot measure."""
    with GGUFFile(path) as file:
        config = ModelConfig.from_gguf(file)
        tokenizer = Tokenizer.from_gguf(file.metadata)
    if config.architecture != "llama":
        raise ModelFileError(f"{path}: float64 is computed for 'llama', this is '{config.architecture}'")
    if config.context_length < CONTEXT:
        raise ModelFileError(f"{path}: a context of {config.context_length:,} tokens, {CONTEXT:,} are needed")
    return real_tokens(tokenizer, CONTEXT)


def _rows(effects: Effects) -> list[list[str]]:
    """A table's header and its rows."""
    first = next(iter(effects.values()))[0].dtype
    columns = ("mean KL", "largest", "same top")
    table = [
        ["context", "KV", "bytes a token", *columns, *(f"{column}, to {first}" for column in columns)],
    ]
    for context, by_dtype in effects.items():
        for effect in by_dtype:
            found = [*_cells(effect.against_float64)]
            found += ["-"] * len(columns) if effect.dtype == first else _cells(effect.against_first)
            size = f"{effect.bytes_per_token:,}"
            table.append([f"{context}, {WHERE[context]}", effect.dtype, size, *found])
    return table


def _cells(fidelity: Fidelity) -> list[str]:
    return [f"{fidelity.mean:.5f}", f"{fidelity.largest:.4f}", f"{fidelity.same_top_share:.1%}"]


def _json(machine: Machine, path: Path, effects: Effects) -> str:
    def numbers(fidelity: Fidelity) -> dict[str, float]:
        return {
            "mean_kl": fidelity.mean,
            "largest_kl": fidelity.largest,
            "same_top_share": fidelity.same_top_share,
        }

    report = {
        "benchmark": "kv_cache_effect",
        "machine": dataclasses.asdict(machine),
        "model": path.name,
        "results": [
            {
                "context": context,
                "first_position": CONTEXT - POSITIONS if context == "long" else 0,
                "positions": len(effect.against_float64.divergence),
                "dtype": effect.dtype,
                "bytes_per_token": effect.bytes_per_token,
                "against_float64": numbers(effect.against_float64),
                **(
                    {f"against_{by_dtype[0].dtype}": numbers(effect.against_first)}
                    if effect is not by_dtype[0]
                    else {}
                ),
            }
            for context, by_dtype in effects.items()
            for effect in by_dtype
        ],
    }
    return json.dumps(report, indent=2)


if __name__ == "__main__":
    sys.exit(main())
