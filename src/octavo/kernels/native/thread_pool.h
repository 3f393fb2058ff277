// A parking thread pool: one job at a time, run by every thread, with barriers and shared counters inside the
// job.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace octavo {

// Flush-to-zero, denormals-are-zero, rounding to nearest and no traps for the life of the object, whatever
// the thread had before; then its former state again.
class FlushDenormals {
  public:
    FlushDenormals();
    ~FlushDenormals();
    FlushDenormals(const FlushDenormals&) = delete;
    FlushDenormals& operator=(const FlushDenormals&) = delete;

  private:
    unsigned saved_;
};

class ThreadPool {
  public:
    // num_threads counts the calling thread: 1 starts no worker. Throws std::runtime_error where the system
    // refuses a thread.
    explicit ThreadPool(int num_threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int num_threads() const { return num_threads_; }

    // Runs job(thread index) once on every thread and returns when all have returned. Workers sleep in the
    // kernel between jobs. The first exception of any thread is rethrown here; a job that uses barrier() must
    // not throw between two barriers on one thread only.
    void run(const std::function<void(int)>& job);

    // --- inside a job ---

    // Waits for every thread and sets the work counter back to 0.
    void barrier();

    // Takes the next `chunk` items of `total`: returns the first, or -1 when none are left. Threads that run
    // on busy cores simply take fewer.
    int64_t take(int64_t total, int64_t chunk) {
        const int64_t first = next_item_.fetch_add(chunk, std::memory_order_relaxed);
        return first < total ? first : -1;
    }

    // Runs body(begin, end) over [0, total) in dynamic chunks, then waits for everybody.
    template <class Body>
    void parallel_for(int64_t total, int64_t chunk, Body&& body) {
        for (int64_t begin = take(total, chunk); begin >= 0; begin = take(total, chunk))
            body(begin, begin + chunk < total ? begin + chunk : total);
        barrier();
    }

  private:
    void worker(int index);
    void stop();
    void wait_for_change(std::atomic<uint32_t>& word, uint32_t seen);

    const int num_threads_;
    std::vector<std::thread> workers_;
    const std::function<void(int)>* job_ = nullptr;
    std::mutex run_mutex_;  // one job at a time, whoever calls
    std::exception_ptr error_;
    std::mutex error_mutex_;
    bool stopping_ = false;

    alignas(64) std::atomic<uint32_t> job_epoch_{0};
    alignas(64) std::atomic<uint32_t> barrier_epoch_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int64_t> next_item_{0};
};

}  // namespace octavo
