// A parking thread pool. Work is handed out in chunks, and a loop is over when its chunks are done, not when
// every thread has arrived: a worker that lost its core is waited for only if it holds a chunk.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <type_traits>
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

    // The right to run loops, one caller at a time, with the workers' floating-point modes.
    class Session {
      public:
        explicit Session(ThreadPool& pool) : lock_(pool.session_mutex_) {}

      private:
        std::lock_guard<std::mutex> lock_;
        FlushDenormals flush_;
    };

    // Runs body(begin, end, thread) over [0, total) in chunks of `chunk` (fewer at the end) on whichever
    // threads are free, and returns when all are done; a single chunk runs at once on the caller. Only within
    // a Session. What one loop wrote the next one reads. The first exception of any chunk is rethrown here.
    template <class Body>
    void parallel_for(int64_t total, int64_t chunk, Body&& body) {
        if (total <= 0) return;
        if (num_threads_ == 1 || total <= chunk) {
            body(int64_t{0}, total, 0);
            return;
        }
        run([](void* context, int64_t begin, int64_t end,
               int thread) { (*static_cast<std::remove_reference_t<Body>*>(context))(begin, end, thread); },
            &body, total, chunk);
    }

  private:
    using ChunkFunction = void (*)(void* context, int64_t begin, int64_t end, int thread);

    void run(ChunkFunction function, void* context, int64_t total, int64_t chunk);
    void help(int thread);
    void run_chunk(int64_t index, int thread);
    void worker(int index);
    void stop();

    const int num_threads_;
    std::vector<std::thread> workers_;
    std::mutex session_mutex_;
    std::exception_ptr error_;
    std::mutex error_mutex_;
    std::atomic<bool> stopping_{false};

    // The loop that is running. A thread reads these only while it holds a chunk, and they change only when
    // no chunk is held.
    ChunkFunction function_ = nullptr;
    void* context_ = nullptr;
    int64_t total_ = 0, chunk_ = 0;

    // | chunks of the loop, 32 bits | next chunk to take, 32 bits |: one word, so that a late thread cannot
    // take a chunk of a loop that is over.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<uint32_t> loop_epoch_{0};  // what sleeping workers watch
    alignas(64) std::atomic<uint32_t> chunks_done_{0};
};

}  // namespace octavo
