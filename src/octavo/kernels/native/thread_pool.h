// A parking thread pool. Work is handed out in chunks, and a loop is over when its chunks are done, not when
// every thread has arrived: a worker that lost its core is waited for only if it holds a chunk.
//
//     chunks of a loop   | 0  1  2  3 | 4  5  6  7 |     two threads
//     thread 0 takes       ->                            its own in order: what it reads next is known,
//     thread 1 takes                    ->               and can be fetched, before it takes it
//     whoever is through                         <-      then the others', from their ends
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

    // Of the chunks of a loop, [first_own_chunk(t), first_own_chunk(t + 1)) are thread t's own.
    int64_t first_own_chunk(int64_t chunks, int thread) const { return chunks * thread / num_threads_; }

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
    bool take(int owner, bool last, uint32_t& chunk);
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

    // A thread's own chunks that nobody has taken: | end, 32 bits | next, 32 bits |. One word, so that a late
    // thread cannot take a chunk of a loop that is over.
    struct alignas(64) Share {
        std::atomic<uint64_t> untaken{0};
    };
    std::vector<Share> shares_;                        // [num_threads]
    alignas(64) std::atomic<uint32_t> loop_epoch_{0};  // what sleeping workers watch
    alignas(64) std::atomic<uint32_t> chunks_done_{0};
};

}  // namespace octavo
