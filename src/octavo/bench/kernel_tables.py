"""What `octavo bench kernels` found, as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from octavo.bench.attention import AttentionResult
from octavo.bench.int8_kv import Int8KVResult
from octavo.bench.kernels import KernelReport
from octavo.bench.matmul import MatmulResult
from octavo.bench.paging import PagingResult
from octavo.bench.shared_prefix import SharedPrefixResult

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_MIB = 1 << 20


def print_report(report: KernelReport, console: Console) -> None:
    """Tables for people."""
    limits = report.limits
    console.print(report.machine.describe())
    console.print(
        f"limits: {limits.fp32_gflops:.0f} GFLOP/s fp32, {limits.int8_gops:.0f} GOP/s int8, "
        f"{limits.int8_summed_gops:.0f} GOP/s int8_summed, "
        f"{limits.read_gbs:.1f} GB/s read over {limits.read_bytes // _MIB} MiB"
    )
    for model, type_ in dict.fromkeys((result.model, result.type) for result in report.matmul):
        products = [r for r in report.matmul if (r.model, r.type) == (model, type_)]
        console.print(_matmul_table(f"{model}, {type_}", products))
    for sentence in report.left_out:
        console.print(f"left out: {sentence}")
    for model, kv_dtype in dict.fromkeys((r.model, r.kv_dtype) for r in report.attention):
        results = [r for r in report.attention if (r.model, r.kv_dtype) == (model, kv_dtype)]
        decode = [r for r in results if r.kind == "decode"]
        if decode:
            console.print(_decode_table(f"{model}, decode from {kv_dtype}", decode))
        for result in results:
            if result.kind != "decode":
                console.print(_prefill_line(result))
    for model, kv_dtype in dict.fromkeys((r.model, r.kv_dtype) for r in report.paging):
        paging = [r for r in report.paging if (r.model, r.kv_dtype) == (model, kv_dtype)]
        console.print(_paging_table(f"{model}, paged from {kv_dtype}", paging))
    for shared in report.shared_prefix:
        console.print(_shared_prefix_line(shared))
    for int8 in report.int8_kv:
        console.print(_int8_kv_line(int8))


def _matmul_table(title: str, results: Sequence[MatmulResult]) -> Table:
    shapes = list(dict.fromkeys((r.shape, r.out_features, r.in_features) for r in results))
    title += f": GOP/s (of {results[0].peak}), and GB/s (of read) for weights that come from memory"
    table = _table(title, ["rows", *(f"{name}\n{columns}x{k}" for name, columns, k in shapes)])
    cells = {(r.shape, r.rows): r for r in results}
    for rows in dict.fromkeys(result.rows for result in results):
        table.add_row(str(rows), *(_matmul_cell(cells.get((name, rows))) for name, _, _ in shapes))
    return table


def _matmul_cell(result: MatmulResult | None) -> str:
    if result is None:
        return ""
    cell = f"{result.gops:.0f} ({result.percent_of_peak:.0f} %)"
    if result.weights_from == "memory":
        cell += f"\n{result.weight_gbs:.1f} ({result.percent_of_read:.0f} %)"
    return cell


def _decode_table(title: str, results: Sequence[AttentionResult]) -> Table:
    streams = list(dict.fromkeys(result.streams for result in results))
    first = results[0]
    title += (
        f", {first.num_heads} heads of {first.head_dim} over {first.num_kv_heads} of keys and values: "
        "GB/s of KV from memory (of read), and GFLOP/s (of fp32)"
    )
    table = _table(title, ["context", *map(_streams, streams)])
    cells = {(r.streams, r.context): r for r in results}
    for context in dict.fromkeys(result.context for result in results):
        table.add_row(f"{context:,}", *(_decode_cell(cells.get((count, context))) for count in streams))
    return table


def _decode_cell(result: AttentionResult | None) -> str:
    if result is None:
        return ""
    return (
        f"{result.kv_gbs:.1f} ({result.percent_of_read:.0f} %)\n"
        f"{result.gflops:.0f} ({result.percent_of_peak:.0f} %)"
    )


def _prefill_line(result: AttentionResult) -> str:
    what = (
        f"prefill of {result.context:,} tokens"
        if result.kind == "prefill"
        else f"the last chunk of {result.context:,} tokens"
    )
    return (
        f"{result.model}, {what} over {result.kv_dtype}: {result.gflops:.1f} GFLOP/s, "
        f"{result.percent_of_peak:.0f} % of fp32, {result.seconds * 1e3:.1f} ms a layer"
    )


def _paging_table(title: str, results: Sequence[PagingResult]) -> Table:
    title += ": times the seconds of contiguous buffers (quartiles), and of such in huge pages"
    columns = list(dict.fromkeys((r.block_size, r.order) for r in results))
    table = _table(title, ["decode", *(f"blocks of {size}\n{order}" for size, order in columns)])
    cells = {(r.streams, r.context, r.block_size, r.order): r for r in results}
    for streams, context in dict.fromkeys((r.streams, r.context) for r in results):
        row = (_paging_cell(cells[streams, context, size, order]) for size, order in columns)
        table.add_row(f"{_streams(streams)}\n{context:,} tokens", *row)
    return table


def _paging_cell(result: PagingResult) -> str:
    cell = f"{result.ratio:.2f} ({result.ratio_low:.2f} to {result.ratio_high:.2f})"
    return cell if result.huge_ratio is None else f"{cell}\n{result.huge_ratio:.2f}"


def _shared_prefix_line(result: SharedPrefixResult) -> str:
    return (
        f"{result.model}, {result.users} users on {result.common_tokens:,} common tokens and "
        f"{result.own_tokens:,} of their own, {result.kv_dtype}: "
        f"{result.shared_seconds * 1e3:.2f} ms a layer, "
        f"{result.speedup_over_private:.2f} times as fast as private copies, "
        f"{result.speedup_over_plain:.2f} times as the same blocks read by each, "
        f"{result.kv_bytes_fraction:.3f} of the bytes read"
    )


def _int8_kv_line(result: Int8KVResult) -> str:
    return (
        f"{result.model}, {_streams(result.streams)} of {result.context:,} tokens: q8 takes "
        f"{result.ratio:.2f} of the time of f16 ({result.ratio_low:.2f} to {result.ratio_high:.2f}) "
        f"and {result.bytes_ratio:.2f} of its bytes"
    )


def _streams(count: int) -> str:
    return f"{count} stream{'s' * (count > 1)}"


def _table(title: str, columns: Iterable[str]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table
