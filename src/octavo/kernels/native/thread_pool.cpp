#include "thread_pool.h"

#include <chrono>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {

namespace {

// Between two operations of a step the others are a few microseconds away; beyond this a core was taken from
// us.
constexpr auto kSpin = std::chrono::microseconds(20);

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

#if defined(__x86_64__)
// 0x8000 flush to zero, 0x40 denormals are zero, 0x1f80 every trap masked; rounding bits 0: to nearest.
FlushDenormals::FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(0x9fc0u); }
FlushDenormals::~FlushDenormals() { _mm_setcsr(saved_); }
#else
FlushDenormals::FlushDenormals() : saved_(0) {}
FlushDenormals::~FlushDenormals() = default;
#endif

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads) {
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
    job_epoch_.fetch_add(1, std::memory_order_release);
    job_epoch_.notify_all();
    for (std::thread& thread : workers_) thread.join();
}

void ThreadPool::wait_for_change(std::atomic<uint32_t>& word, uint32_t seen) {
    const auto give_up = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < 32; ++i) {
            if (word.load(std::memory_order_acquire) != seen) return;
            relax();
        }
    } while (std::chrono::steady_clock::now() < give_up);
    while (word.load(std::memory_order_acquire) == seen) word.wait(seen, std::memory_order_acquire);
}

void ThreadPool::barrier() {
    const uint32_t epoch = barrier_epoch_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
        arrived_.store(0, std::memory_order_relaxed);
        next_item_.store(0, std::memory_order_relaxed);
        barrier_epoch_.store(epoch + 1, std::memory_order_release);
        if (num_threads_ > 1) barrier_epoch_.notify_all();
    } else {
        wait_for_change(barrier_epoch_, epoch);
    }
}

void ThreadPool::worker(int index) {
    FlushDenormals flush;
    uint32_t seen = 0;
    for (;;) {
        wait_for_change(job_epoch_, seen);
        ++seen;
        if (stopping_) return;
        try {
            (*job_)(index);
        } catch (...) {
            std::lock_guard lock(error_mutex_);
            if (!error_) error_ = std::current_exception();
        }
        barrier();
    }
}

void ThreadPool::run(const std::function<void(int)>& job) {
    std::lock_guard one_at_a_time(run_mutex_);
    FlushDenormals flush;
    job_ = &job;
    error_ = nullptr;
    next_item_.store(0, std::memory_order_relaxed);
    job_epoch_.fetch_add(1, std::memory_order_release);
    if (num_threads_ > 1) job_epoch_.notify_all();
    try {
        job(0);
    } catch (...) {
        std::lock_guard lock(error_mutex_);
        if (!error_) error_ = std::current_exception();
    }
    barrier();
    job_ = nullptr;
    if (error_) std::rethrow_exception(error_);
}

}  // namespace octavo
