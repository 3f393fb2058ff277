from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

_Ints = npt.NDArray[np.int32]
_Floats = npt.NDArray[np.float32]
_Bytes = npt.NDArray[np.uint8]

class ThreadPool:
    def __init__(self, num_threads: int) -> None: ...
    @property
    def num_threads(self) -> int: ...

PACK_STRIP_BYTES: int

class WeightStore:
    def __init__(self, expected_bytes: int = 0) -> None: ...
    @property
    def used_bytes(self) -> int: ...

class Matrix:
    def __init__(
        self,
        store: WeightStore,
        type: str,
        data: _Bytes,
        out_features: int,
        in_features: int,
        pool: ThreadPool,
        have_read: Callable[[int, int], None] | None = None,
    ) -> None: ...
    @property
    def type(self) -> str: ...
    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def dequantize(self) -> _Floats: ...

class Sampled:
    @property
    def token_id(self) -> int: ...
    @property
    def logprob(self) -> float: ...
    @property
    def top_logprobs(self) -> list[tuple[int, float]]: ...

class Sampler:
    def __init__(
        self,
        vocab_size: int,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        seed: int = 0,
        choice_index: int = 0,
        num_logprobs: int = -1,
        logit_bias: dict[int, float] = ...,
        min_tokens: int = 0,
        stop_token_ids: Sequence[int] = ...,
    ) -> None: ...
    def observe_prompt(self, token_ids: _Ints) -> None: ...
    def sample(self, logits: _Floats) -> Sampled: ...
    def distribution(self, logits: _Floats) -> tuple[_Ints, npt.NDArray[np.float64]]: ...
    @property
    def vocab_size(self) -> int: ...

class Program:
    def __init__(self, pool: ThreadPool, instruction_set: str, row_tile: int) -> None: ...
    def buffer(self, width: int) -> int: ...
    def embed(self, table: Matrix, out: int) -> None: ...
    def rms_norm(self, x: int, weight: _Floats, eps: float, out: int) -> None: ...
    def linear(self, x: int, matrices: Sequence[Matrix], out: int, accumulate: bool) -> None: ...
    def attention(
        self,
        qkv: int,
        out: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        window: int = 0,
        soft_cap: float = 0.0,
    ) -> None: ...
    def gated_linear(self, x: int, gate: Matrix, up: Matrix, out: int) -> None: ...
    def logits(self, x: int, norm_weight: _Floats, eps: float, head: Matrix) -> None: ...
    def rope(self, inverse_frequencies: npt.NDArray[np.float64], magnitude: float) -> None: ...
    def bind(
        self, arena_address: int, extent_bytes: int, num_blocks: int, block_size: int, kv_dtype: str = "f16"
    ) -> None: ...
    shared_prefix_attention: bool
    @property
    def kv_rows_read(self) -> int: ...
    @property
    def kv_rows_attended(self) -> int: ...
    @property
    def buffer_bytes(self) -> int: ...
    @property
    def instruction_set(self) -> str: ...
    def step(
        self,
        token_ids: _Ints,
        chunk_starts: _Ints,
        chunk_lens: _Ints,
        block_table_offsets: _Ints,
        block_tables: _Ints,
        samplers: Sequence[Sampler | None],
    ) -> list[Sampled | None]: ...
    def logits_of_all_rows(
        self,
        token_ids: _Ints,
        chunk_starts: _Ints,
        chunk_lens: _Ints,
        block_table_offsets: _Ints,
        block_tables: _Ints,
    ) -> _Floats: ...

def exp_negative(x: _Floats) -> _Floats: ...
def log_positive(x: float) -> float: ...
def available_instruction_sets() -> list[str]: ...
def matmul(pool: ThreadPool, matrix: Matrix, x: _Floats, instruction_set: str = "") -> _Floats: ...
def time_matmul(
    pool: ThreadPool, matrix: Matrix, x: _Floats, repeats: int, instruction_set: str = ""
) -> list[float]: ...
def paged_attention(
    pool: ThreadPool,
    arena: _Bytes,
    extent_bytes: int,
    layer_offset: int,
    block_size: int,
    num_kv_heads: int,
    q: _Floats,
    chunk_starts: _Ints,
    chunk_lens: _Ints,
    table_offsets: _Ints,
    block_tables: _Ints,
    instruction_set: str = "",
    kv_dtype: str = "f16",
    window: int = 0,
    soft_cap: float = 0.0,
    share_prefixes: bool = True,
) -> _Floats: ...
def time_paged_attention(
    pool: ThreadPool,
    arena: _Bytes,
    extent_bytes: int,
    layer_offset: int,
    block_size: int,
    num_kv_heads: int,
    q: _Floats,
    chunk_starts: _Ints,
    chunk_lens: _Ints,
    table_offsets: _Ints,
    block_tables: _Ints,
    repeats: int,
    instruction_set: str = "",
    kv_dtype: str = "f16",
    window: int = 0,
    soft_cap: float = 0.0,
    share_prefixes: bool = True,
) -> list[float]: ...
def peak_fma(pool: ThreadPool, iterations: int, instruction_set: str = "") -> float: ...
def peak_int8(pool: ThreadPool, iterations: int, instruction_set: str = "") -> float: ...
def peak_int8_summed(pool: ThreadPool, iterations: int, instruction_set: str = "") -> float: ...
def time_read(pool: ThreadPool, data: _Bytes, repeats: int, instruction_set: str = "") -> list[float]: ...
