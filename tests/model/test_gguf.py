"""The GGUF reader: what the `gguf` package writes comes back, and a damaged file is one clear sentence."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counted_lines import count_lines
from octavo.model.errors import ModelFileError
from octavo.model.gguf import GGUFFile

U32, I32, STRING, ARRAY = 4, 5, 8, 9
F32 = 0
YOUNGEST_TYPE = 39  # MXFP4; what came later is refused as unknown


def text(value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int = F32, offset: int = 0) -> bytes:
    """A line of the tensor table; `shape` in the file's order, fastest first."""
    return text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape) + struct.pack("<IQ", kind, offset)


def file_of(
    entries: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = b"",
    version: int = 3,
) -> bytes:
    entries, tensors = entries or [], tensors or []
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries)) + b"".join(entries + tensors)
    return head + bytes(-len(head) % 32) + data


@pytest.fixture
def fault_of(tmp_path: Path) -> Callable[[bytes], str]:
    """Opening a file of these bytes fails; the sentence, without the file's name in front."""

    def fault(raw: bytes) -> str:
        path = tmp_path / "model.gguf"
        path.write_bytes(raw)
        with pytest.raises(ModelFileError) as caught:
            GGUFFile(path)
        message = str(caught.value)
        assert message.startswith(f"{path}: ")
        assert "\n" not in message
        return message.removeprefix(f"{path}: ")

    return fault


def test_reads_the_same_as_the_gguf_package(smollm2_path: Path) -> None:
    theirs = gguf.GGUFReader(os.fspath(smollm2_path))
    with GGUFFile(smollm2_path) as ours:
        assert set(ours.metadata) == {name for name in theirs.fields if not name.startswith("GGUF.")}
        for name, value in ours.metadata.items():
            assert value == theirs.fields[name].contents()
        assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
        for expected in theirs.tensors:
            info = ours.tensors[expected.name]
            assert info.type == expected.tensor_type.name
            assert info.shape == tuple(int(extent) for extent in expected.shape[::-1])
            assert np.array_equal(ours.data(expected.name), expected.data.view(np.uint8).reshape(-1))


def test_reads_every_value_type_that_the_gguf_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "types.gguf"
    writer = gguf.GGUFWriter(os.fspath(path), "llama")
    values = {
        "uint8": 255,
        "int8": -128,
        "uint16": 65_535,
        "int16": -32_768,
        "uint32": 2**32 - 1,
        "int32": -(2**31),
        "uint64": 2**64 - 1,
        "int64": -(2**63),
        "float32": 0.5,
        "float64": 1e300,
        "bool": True,
        "string": "größer 蟹 🦀",
    }
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(kind, value)
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("fractions", [0.5, -0.25])
    writer.add_array("flags", [True, False])
    writer.add_array("strings", ["", "a", "é" * 300])
    floats = np.arange(12, dtype=np.float32).reshape(3, 4)
    writer.add_tensor("floats", floats)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with GGUFFile(path) as file:
        for kind, value in values.items():
            assert file.metadata[kind] == value
            assert type(file.metadata[kind]) is type(value)
        assert file.metadata["numbers"] == [1, -2, 3]
        assert file.metadata["fractions"] == [0.5, -0.25]
        assert file.metadata["flags"] == [True, False]
        assert file.metadata["strings"] == ["", "a", "é" * 300]
        assert file.tensors["floats"].shape == (3, 4)
        assert np.array_equal(file.data("floats").view(np.float32).reshape(3, 4), floats)


@pytest.mark.parametrize("kind", list(gguf.GGMLQuantizationType), ids=lambda kind: kind.name)
def test_sizes_of_tensor_types_agree_with_the_gguf_package(
    tmp_path: Path, kind: gguf.GGMLQuantizationType
) -> None:
    """Also those that we cannot compute with: the refusal must name the type, not a broken file."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    path = tmp_path / "one.gguf"
    path.write_bytes(file_of(tensors=[tensor("w", (2 * block, 3), kind.value)], data=bytes(6 * size)))
    if kind.value > YOUNGEST_TYPE:
        with pytest.raises(ModelFileError, match=f"unknown type {kind.value}"):
            GGUFFile(path)
    else:
        with GGUFFile(path) as file:
            assert (file.tensors["w"].type, file.tensors["w"].nbytes) == (kind.name, 6 * size)


def test_version_2_and_nested_arrays_and_other_alignments(tmp_path: Path) -> None:
    nested = struct.pack("<IQ", ARRAY, 2) + 2 * (struct.pack("<IQ", I32, 2) + struct.pack("<ii", 7, -7))
    path = tmp_path / "v2.gguf"
    alignment = entry("general.alignment", U32, struct.pack("<I", 8))
    tensors = [tensor("a", (2,), offset=0), tensor("b", (2,), offset=8)]
    head = b"GGUF" + struct.pack("<IQQ", 2, 2, 2) + entry("n", ARRAY, nested) + alignment + b"".join(tensors)
    path.write_bytes(head + bytes(-len(head) % 8) + struct.pack("<4f", 1, 2, 3, 4))
    with GGUFFile(path) as file:
        assert file.metadata["n"] == [[7, -7], [7, -7]]
        assert file.data("b").view(np.float32).tolist() == [3.0, 4.0]


def test_views_outlive_the_file_and_dropped_pages_come_back(tiny_model_path: Path) -> None:
    file = GGUFFile(tiny_model_path)
    view = file.data("token_embd.weight")
    before = view.copy()
    file.drop_pages()
    file.close()
    file.close()
    assert np.array_equal(view, before)
    assert not view.flags.writeable


def test_a_missing_tensor_is_named(tiny_model_path: Path) -> None:
    with GGUFFile(tiny_model_path) as file, pytest.raises(ModelFileError, match=r"'blk\.9\.attn_q\.weight'"):
        file.data("blk.9.attn_q.weight")


def test_faults_of_the_file_itself(fault_of: Callable[[bytes], str], tmp_path: Path) -> None:
    assert fault_of(b"") == "the file is empty (0 bytes)"
    assert fault_of(b"PK\x03\x04 a zip") == (
        "this is not a GGUF file: it begins with b'PK\\x03\\x04' instead of 'GGUF'"
    )
    assert "cut short" in fault_of(b"GGUF")
    assert fault_of(file_of(version=1)) == "GGUF version 1 is not supported, only 2 and 3"
    assert fault_of(b"GGUF" + struct.pack(">IQQ", 3, 0, 0)) == (
        "the file is big-endian, and only little-endian files are supported"
    )
    with pytest.raises(ModelFileError, match="no such file"):
        GGUFFile(tmp_path / "nowhere.gguf")
    with pytest.raises(ModelFileError, match="this is a folder"):
        GGUFFile(tmp_path)


def test_faults_of_the_metadata(fault_of: Callable[[bytes], str]) -> None:
    number = entry("k", U32, struct.pack("<I", 1))
    assert fault_of(file_of([number, number])) == "the metadata entry 'k' appears twice"
    assert (
        fault_of(file_of([entry("k", 77, bytes(16))]))
        == "the metadata entry 'k' has the unknown value type 77"
    )
    assert "unknown value type 77" in fault_of(file_of([entry("k", ARRAY, struct.pack("<IQ", 77, 1))]))
    assert (
        fault_of(file_of([entry("k", STRING, text(b"\xff\xfe"))]))
        == "the metadata entry 'k' is not UTF-8 text"
    )
    strings = struct.pack("<IQ", STRING, 2) + text("good") + text(b"\xc3")
    assert fault_of(file_of([entry("k", ARRAY, strings)])) == (
        "string 1 of the metadata entry 'k' is not UTF-8 text"
    )
    deep = struct.pack("<IQ", ARRAY, 1) * 1000 + struct.pack("<IQ", U32, 0)
    assert "nests arrays more than 4 deep" in fault_of(file_of([entry("k", ARRAY, deep)]))
    alignment = entry("general.alignment", U32, struct.pack("<I", 0))
    assert fault_of(file_of([alignment])) == "general.alignment is 0, not a positive multiple of 8"


@pytest.mark.parametrize("count", [2**63, 2**64 - 1, 10**12])
def test_absurd_counts_are_refused_before_anything_is_allocated(
    fault_of: Callable[[bytes], str], count: int
) -> None:
    assert f"counts {count:,} tensors" in fault_of(b"GGUF" + struct.pack("<IQQ", 3, count, 0))
    assert f"counts {count:,} metadata entries" in fault_of(b"GGUF" + struct.pack("<IQQ", 3, 0, count))
    for kind in (U32, STRING, ARRAY):
        array = struct.pack("<IQ", kind, count)
        assert "cut short" in fault_of(file_of([entry("k", ARRAY, array)]))
    long_string = struct.pack("<IQ", STRING, 1) + struct.pack("<Q", count)
    assert "cut short" in fault_of(file_of([entry("k", ARRAY, long_string)]))
    assert "cut short" in fault_of(file_of([entry("k", STRING, struct.pack("<Q", count))]))
    assert "cut short" in fault_of(file_of(tensors=[tensor("w", (count, count))], data=bytes(64)))


def test_faults_of_tensors(fault_of: Callable[[bytes], str]) -> None:
    def fault(*tensors: bytes) -> str:
        return fault_of(file_of(tensors=list(tensors), data=bytes(256)))

    assert fault(tensor("w", (4,)), tensor("w", (4,), offset=32)) == "the tensor 'w' appears twice"
    assert fault(tensor("w", (32,), kind=200)) == "the tensor 'w' has the unknown type 200"
    assert fault(tensor("w", (32,), kind=4)) == "the tensor 'w' has the unknown type 4"  # withdrawn by ggml
    assert fault(tensor("w", (33,), kind=2)) == (
        "the tensor 'w' has rows of 33 elements, but Q4_0 codes 32 at a time"
    )
    assert fault(tensor("w", (4,), offset=4)) == "the tensor 'w' lies at offset 4, not a multiple of 32"
    assert "dimensions" in fault(tensor("w", (1, 1, 1, 1, 1)))
    assert "dimensions" in fault(tensor("w", ()))
    assert "is empty" in fault(tensor("w", (0,)))
    assert fault(tensor("a", (16,)), tensor("b", (16,), offset=32)) == "the tensors 'a' and 'b' overlap"
    assert "the tensor 'w' ends at byte" in fault(tensor("w", (65,)))
    assert "cut short" in fault(tensor("w", (4,), offset=2**63))


def test_a_file_cut_anywhere_is_called_cut_short(tiny_model_path: Path, tmp_path: Path) -> None:
    whole = tiny_model_path.read_bytes()
    cut = tmp_path / "cut.gguf"
    with GGUFFile(tiny_model_path) as file:
        last = max(info.offset + info.nbytes for info in file.tensors.values())
    for length in [*range(1, 400), *range(400, last, 997), last - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelFileError, match=r"cut short|not a GGUF file|cannot fit"):
            GGUFFile(cut)


@settings(max_examples=400)
@given(st.data())
def test_damaged_heads_never_raise_anything_else(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_path: Path, data: st.DataObject
) -> None:
    raw = bytearray(tiny_model_path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, 12_000))
        raw[place] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(raw)
    # What the damage left readable must be readable to the last byte; all else is our own error.
    with contextlib.suppress(ModelFileError), GGUFFile(path) as file:
        for name in file.tensors:
            file.data(name).sum()


def test_a_vocabulary_of_262144_tokens_opens_with_a_few_lines_a_token(tmp_path: Path) -> None:
    """The gguf package's reader takes 9 to 18 s, ours 0.1 s."""
    tokens = b"".join(text(f"token{number}") for number in range(262_144))
    scores = struct.pack("<IQ", 6, 262_144) + bytes(4 * 262_144)
    path = tmp_path / "large.gguf"
    path.write_bytes(
        file_of(
            [
                entry("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, 262_144) + tokens),
                entry("tokenizer.ggml.scores", ARRAY, scores),
            ]
        )
    )

    def open_it() -> None:
        with GGUFFile(path) as file:
            assert file.metadata["tokenizer.ggml.tokens"][-1] == "token262143"

    assert count_lines(open_it) < 5 * 262_144
