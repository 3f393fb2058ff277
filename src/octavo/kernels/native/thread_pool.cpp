#include "thread_pool.h"

#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {

namespace {

// Between two loops of a step the others are a few microseconds away; beyond this a core was taken from us.
constexpr auto kSpin = std::chrono::microseconds(20);

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A short spin, then the kernel.
void wait_while_equal(std::atomic<uint32_t>& word, uint32_t seen) {
    const auto give_up = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < 32; ++i) {
            if (word.load(std::memory_order_acquire) != seen) return;
            relax();
        }
    } while (std::chrono::steady_clock::now() < give_up);
    word.wait(seen, std::memory_order_acquire);
}

}  // namespace

#if defined(__x86_64__)
// 0x8000 flush to zero, 0x40 denormals are zero, 0x1f80 every trap masked; rounding bits 0: to nearest.
FlushDenormals::FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(0x9fc0u); }
FlushDenormals::~FlushDenormals() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
namespace {
void write_fpcr(uint64_t fpcr) { asm volatile("msr fpcr, %0" : : "r"(fpcr) : "memory"); }
uint64_t read_fpcr() {
    uint64_t fpcr;
    asm volatile("mrs %0, fpcr" : "=r"(fpcr) : : "memory");
    return fpcr;
}
}  // namespace

// Bit 24, FZ, flushes denormals on the way in and out. All else is 0: rounding to nearest, no traps, halves
// as IEEE 754 has them (AHP) and their denormals kept (FZ16).
FlushDenormals::FlushDenormals() : saved_(static_cast<unsigned>(read_fpcr())) { write_fpcr(1u << 24); }
FlushDenormals::~FlushDenormals() { write_fpcr(saved_); }
#else
FlushDenormals::FlushDenormals() : saved_(0) {}
FlushDenormals::~FlushDenormals() = default;
#endif

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads), shares_(num_threads) {
    workers_.reserve(num_threads - 1);
    try {
        for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this, i] { worker(i); });
    } catch (const std::exception& fault) {
        const size_t started = workers_.size();
        stop();  // the destructor will not run
        throw std::runtime_error("the system starts " + std::to_string(started) + " of " +
                                 std::to_string(num_threads - 1) + " worker threads: " + fault.what());
    }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
    stopping_ = true;
    loop_epoch_.fetch_add(1, std::memory_order_release);
    loop_epoch_.notify_all();
    for (std::thread& thread : workers_) thread.join();
}

void ThreadPool::worker(int index) {
    FlushDenormals flush;
    uint32_t seen = 0;
    for (;;) {
        wait_while_equal(loop_epoch_, seen);
        seen = loop_epoch_.load(std::memory_order_acquire);
        if (stopping_) return;
        help(index);
    }
}

void ThreadPool::help(int thread) {
    uint32_t chunk;
    while (take(thread, false, chunk)) run_chunk(chunk, thread);
    for (int i = 1; i < num_threads_; ++i)
        while (take((thread + i) % num_threads_, true, chunk)) run_chunk(chunk, thread);
}

// The first or the last of a thread's own chunks that is left; false if there is none.
bool ThreadPool::take(int owner, bool last, uint32_t& chunk) {
    std::atomic<uint64_t>& untaken = shares_[owner].untaken;
    uint64_t seen = untaken.load(std::memory_order_relaxed);
    for (;;) {
        const uint32_t next = static_cast<uint32_t>(seen), end = static_cast<uint32_t>(seen >> 32);
        if (next == end) return false;
        const uint64_t left = last ? seen - (uint64_t{1} << 32) : seen + 1;
        // Taken from the loop that is running now, whichever loop the word was read for.
        if (untaken.compare_exchange_weak(seen, left, std::memory_order_acquire, std::memory_order_relaxed)) {
            chunk = last ? end - 1 : next;
            return true;
        }
    }
}

void ThreadPool::run_chunk(int64_t index, int thread) {
    const int64_t begin = index * chunk_;
    const int64_t end = begin + chunk_ < total_ ? begin + chunk_ : total_;
    const uint32_t chunks = static_cast<uint32_t>((total_ + chunk_ - 1) / chunk_);
    try {
        function_(context_, begin, end, thread);
    } catch (...) {
        std::lock_guard lock(error_mutex_);
        if (!error_) error_ = std::current_exception();
    }
    // Once the last chunk is counted the caller goes on: nothing of the loop may be touched after this.
    if (chunks_done_.fetch_add(1, std::memory_order_acq_rel) + 1 == chunks && thread != 0)
        chunks_done_.notify_one();
}

void ThreadPool::run(ChunkFunction function, void* context, int64_t total, int64_t chunk) {
    const uint32_t chunks = static_cast<uint32_t>((total + chunk - 1) / chunk);
    function_ = function;
    context_ = context;
    total_ = total;
    chunk_ = chunk;
    chunks_done_.store(0, std::memory_order_relaxed);
    for (int i = 0; i < num_threads_; ++i)
        shares_[i].untaken.store(static_cast<uint64_t>(first_own_chunk(chunks, i + 1)) << 32 |
                                     static_cast<uint64_t>(first_own_chunk(chunks, i)),
                                 std::memory_order_release);
    loop_epoch_.fetch_add(1, std::memory_order_release);
    loop_epoch_.notify_all();
    help(0);
    for (uint32_t done = chunks_done_.load(std::memory_order_acquire); done != chunks;
         done = chunks_done_.load(std::memory_order_acquire))
        wait_while_equal(chunks_done_, done);
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

}  // namespace octavo
