"""The thread pool: every job done once, nobody busy between jobs, the caller's arithmetic left as it was."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kernels.paged_kv import attend, random_chunk, random_kv, same_bytes
from kernels.recorded import normed
from kernels.weights import Floats, random_matrix
from octavo.kernels import Matrix, ThreadPool, WeightStore
from octavo.kernels._native import matmul

UPWARD, TOWARD_ZERO = 0x800, 0xC00  # <fenv.h> of x86
ON_X86 = pytest.mark.skipif(
    "x86_64" not in (sys.implementation._multiarch or ""), reason="rounding modes by x86's numbers"
)


def activations(rows: int) -> Floats:
    return np.random.default_rng(rows).standard_normal((rows, 64)).astype(np.float32)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_thousands_of_tiny_jobs_are_each_done_once(threads: int) -> None:
    """More threads than processors: whoever sleeps must be woken, and nobody may start the next job early."""
    pool = ThreadPool(threads)
    matrix = random_matrix("Q8_0", 24, 64)
    rows = [activations(count) for count in (1, 2, 5)]
    expected = [matmul(ThreadPool(1), matrix, x) for x in rows]
    for _ in range(300):
        for x, right in zip(rows, expected, strict=True):
            assert same_bytes(matmul(pool, matrix, x), right)


def test_jobs_after_a_pause_find_the_threads_asleep_and_wake_them() -> None:
    pool = ThreadPool(3)
    matrix, x = random_matrix("Q4_0", 24, 64), activations(3)
    expected = matmul(ThreadPool(1), matrix, x)
    for pause in (0.0, 1e-5, 1e-4, 1e-3, 1e-2, 0.1):
        time.sleep(pause)
        assert same_bytes(matmul(pool, matrix, x), expected)


def test_pools_of_two_python_threads_do_not_disturb_each_other() -> None:
    matrix = random_matrix("Q4_1", 40, 64)

    def work(seed: int) -> bool:
        pool, x = ThreadPool(2), activations(seed)
        expected = matmul(ThreadPool(1), matrix, x)
        return all(same_bytes(matmul(pool, matrix, x), expected) for _ in range(300))

    with ThreadPoolExecutor(2) as two:
        assert list(two.map(work, (3, 7))) == [True, True]


def test_python_threads_that_share_a_pool_take_turns() -> None:
    pool, matrix = ThreadPool(2), random_matrix("Q8_0", 40, 64)

    def work(seed: int) -> bool:
        x = activations(seed)
        expected = matmul(ThreadPool(1), matrix, x)
        return all(same_bytes(matmul(pool, matrix, x), expected) for _ in range(200))

    with ThreadPoolExecutor(3) as three:
        assert list(three.map(work, (2, 5, 9))) == [True, True, True]


def test_other_python_threads_run_during_a_job() -> None:
    """The interpreter lock is released: a counter in Python goes on while a product is computed."""
    pool, matrix = ThreadPool(1), random_matrix("F32", 256, 512)
    x = np.random.default_rng(0).standard_normal((256, 512)).astype(np.float32)
    started, stop, counted = threading.Event(), threading.Event(), 0

    def count() -> None:
        nonlocal counted
        started.set()
        while not stop.is_set():
            counted += 1
            time.sleep(0)

    counter = threading.Thread(target=count)
    counter.start()
    started.wait()
    during = []
    for _ in range(5):
        before = counted
        matmul(pool, matrix, x, "portable")
        during.append(counted - before)
    stop.set()
    counter.join()
    assert max(during) > 10, during


def test_an_idle_pool_uses_no_processor_time() -> None:
    pool = ThreadPool(4)
    matmul(pool, random_matrix("Q8_0", 24, 64), activations(2))
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.6)
    assert time.process_time() - before < 0.006


def test_a_pool_that_is_forgotten_ends_its_threads() -> None:
    def count() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))

    gc.collect()  # pools of other tests
    before = count()
    pools = [ThreadPool(5) for _ in range(3)]
    assert count() == before + 12
    del pools
    deadline = time.monotonic() + 5.0  # the system takes a moment to forget a thread that was joined
    while count() != before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert count() == before


# --- A worker that lost its core

# A worker is stopped where it stands, as if another process had its core: a signal whose handler is libc's
# `pause` holds that one thread until a second signal. In a process of its own, whose signals these are.
_STOPPABLE = """
import ctypes, os, signal, threading, time
import numpy as np
from pathlib import Path
from kernels.weights import random_matrix
from octavo.kernels import ThreadPool
from octavo.kernels._native import matmul

libc = ctypes.CDLL(None)
libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
libc.signal(signal.SIGUSR2, ctypes.cast(libc.pause, ctypes.c_void_p))
signal.signal(signal.SIGUSR1, lambda *_: None)

def tasks():
    return {int(task) for task in os.listdir("/proc/self/task")}

def in_handler(task):
    lines = Path(f"/proc/self/task/{task}/status").read_text().splitlines()
    blocked = next(int(line.split()[1], 16) for line in lines if line.startswith("SigBlk:"))
    return bool(blocked >> signal.SIGUSR2 - 1 & 1)

def send(task, number, stopped):
    deadline = time.monotonic() + 30
    libc.tgkill(os.getpid(), task, number)
    while in_handler(task) != stopped:
        assert time.monotonic() < deadline
        time.sleep(0.001)

def computed_seconds(task):
    return int(Path(f"/proc/self/task/{task}/schedstat").read_text().split()[0]) / 1e9

matrix = random_matrix("F32", 2048, 2048)
x = np.random.default_rng(0).standard_normal((256, 2048)).astype(np.float32)
expected = matmul(ThreadPool(1), matrix, x).tobytes()
before = tasks()
pool = ThreadPool(2)
(worker,) = tasks() - before
"""


def stoppable(program: str) -> None:
    """Raises where the program fails, or hangs."""
    folder = Path(__file__).parents[1]
    subprocess.run(
        [sys.executable, "-c", _STOPPABLE + program],
        env={**os.environ, "PYTHONPATH": os.fspath(folder)},
        timeout=120,
        check=True,
    )


def test_a_worker_without_a_core_is_not_waited_for() -> None:
    stoppable("""
send(worker, signal.SIGUSR2, True)
for _ in range(20):
    assert matmul(pool, matrix, x).tobytes() == expected
assert in_handler(worker)
send(worker, signal.SIGUSR1, False)
for _ in range(20):
    assert matmul(pool, matrix, x).tobytes() == expected
""")


def test_a_worker_that_loses_its_core_in_a_chunk_is_waited_for() -> None:
    """Chunks of about 100 ms: a worker that has computed for 5 ms is in one."""
    stoppable("""
got = []
caller = threading.Thread(target=lambda: got.append(matmul(pool, matrix, x, "portable").tobytes()))
begin = computed_seconds(worker)
caller.start()
deadline = time.monotonic() + 60
while computed_seconds(worker) < begin + 0.005:
    assert caller.is_alive() and time.monotonic() < deadline
    time.sleep(0.001)
send(worker, signal.SIGUSR2, True)
caller.join(3)
assert caller.is_alive() and not got
send(worker, signal.SIGUSR1, False)
caller.join(60)
assert got == [expected]
""")


@pytest.mark.parametrize("threads", [0, -1, 1025])
def test_an_impossible_number_of_threads_is_refused_with_the_number(threads: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 1,024 threads, not {threads}"):
        ThreadPool(threads)


def test_a_thread_that_the_system_refuses_is_an_error_and_not_the_end_of_the_process() -> None:
    program = """
import resource
from octavo.kernels import Matrix, ThreadPool, WeightStore
room = 256 << 20  # for a few stacks of 8 MiB
resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, 8 << 20))
with open("/proc/self/statm") as statm:
    size = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + room, size + room))
try:
    ThreadPool(1000)
except RuntimeError as fault:
    print(fault)
ThreadPool(2)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "of 999 worker threads" in done.stdout


# --- The caller's arithmetic


def every_kind_of_job(pool: ThreadPool) -> Iterator[Callable[[], object]]:
    matrix, x = random_matrix("Q4_0", 24, 64), activations(3)
    chunk = random_chunk(np.random.default_rng(0), random_kv(np.random.default_rng(1), 40, 1, 16), 2, 30, 5)
    yield lambda: matmul(pool, matrix, x)
    yield lambda: attend([chunk], pool=pool)
    yield lambda: normed(x, np.ones(64, dtype=np.float32), 1e-5)  # a whole step


@contextmanager
def rounding(mode: int) -> Iterator[None]:
    libm = ctypes.CDLL("libm.so.6")
    before = libm.fegetround()
    assert libm.fesetround(mode) == 0
    try:
        yield
    finally:
        libm.fesetround(before)


@pytest.mark.parametrize("threads", [1, 2])
def test_subnormal_numbers_still_work_after_a_job(threads: int) -> None:
    """Jobs flush them to zero; the rest of the process, numpy included, must not."""
    small = np.full(64, 1e-40, dtype=np.float32)
    for job in every_kind_of_job(ThreadPool(threads)):
        job()
        assert (small * np.float32(0.5) > 0.0).all()
        assert (small + small > small).all()
        assert (small.astype(np.float64) > 0.0).all()


def test_subnormal_numbers_still_work_after_a_job_was_refused() -> None:
    small = np.full(64, 1e-40, dtype=np.float32)
    with pytest.raises(ValueError, match="scale that is not finite"):
        Matrix(WeightStore(), "Q8_0", np.full(34, 0xFF, dtype=np.uint8), 1, 32, ThreadPool(2))
    assert (small * np.float32(0.5) > 0.0).all()


@ON_X86
@pytest.mark.parametrize("mode", [UPWARD, TOWARD_ZERO])
def test_the_callers_rounding_mode_neither_matters_nor_changes(mode: int) -> None:
    """Bytes depend on nothing outside; threads made under another mode inherit it, and must not keep it."""
    random = np.random.default_rng(2)
    chunk = random_chunk(random, random_kv(random, 300, 2, 32), 3, 200, 60)
    matrix, x = random_matrix("Q4_1", 24, 64), activations(5)
    attended, multiplied = attend([chunk])[0], matmul(ThreadPool(1), matrix, x)
    early = ThreadPool(2)
    with rounding(mode):
        late = ThreadPool(2)
        outs = [(attend([chunk], pool=pool)[0], matmul(pool, matrix, x)) for pool in (early, late)]
        still = ctypes.CDLL("libm.so.6").fegetround()
    outs.append((attend([chunk], pool=late)[0], matmul(late, matrix, x)))
    assert still == mode
    for again, product in outs:
        assert same_bytes(again, attended)
        assert same_bytes(product, multiplied)
