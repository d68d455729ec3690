#include "runtime/team.h"

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace everstream {

namespace {

constexpr auto SPIN_TIME = std::chrono::microseconds(50);

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

// What the threads of one run have taken and finished.
struct Worker::Run {
    // How many tasks of a thread's range were taken in a phase, whose number is in the high bits.
    struct alignas(64) Taken {
        std::atomic<uint64_t> phase_and_number{0};
    };
    Run(Team::Work w, int num_threads) : work(std::move(w)), ranges(size_t(num_threads)) {}

    Team::Work work;
    std::vector<Taken> ranges;
    std::atomic<int64_t> finished{0};
};

int Worker::count() const { return team_.size(); }

void Worker::begin_phase(int num_tasks) {
    phase_++;
    total_ += num_tasks;
}

// One of the `num` tasks of a range; `num` where all are taken.
int Worker::claim(int owner, int num) {
    std::atomic<uint64_t>& taken = run_.ranges[size_t(owner)].phase_and_number;
    uint64_t seen = taken.load(std::memory_order_relaxed);
    while (true) {
        const auto phase = uint32_t(seen >> 32);
        const int number = phase == phase_ ? int(uint32_t(seen)) : 0;
        if (phase > phase_ || number >= num) return num;
        const uint64_t next = uint64_t(phase_) << 32 | uint64_t(number + 1);
        if (taken.compare_exchange_weak(seen, next, std::memory_order_relaxed)) return number;
    }
}

void Worker::finish(int num) {
    if (run_.finished.fetch_add(num) + num == total_) team_.wake();
}

void Worker::wait() {
    team_.wait([&] { return run_.finished.load() >= total_; });
}

Team::Team(int num_threads) {
    for (int i = 1; i < num_threads; i++) threads_.emplace_back([this, i] { loop(i); });
}

Team::~Team() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        closed_ = true;
        round_.fetch_add(1);
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

template <class Ready>
void Team::wait(Ready ready) {
    if (ready()) return;
    const auto until = std::chrono::steady_clock::now() + SPIN_TIME;
    do {
        for (int i = 0; i < 16; i++) {
            if (ready()) return;
            pause();
        }
    } while (std::chrono::steady_clock::now() < until);
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    changed_.wait(lock, ready);
    sleepers_.fetch_sub(1);
}

// After a change that another thread may wait for. The change and the look at who sleeps are
// sequentially consistent: either the sleeper sees the change, or we see the sleeper.
void Team::wake() {
    if (sleepers_.load() == 0) return;
    { const std::lock_guard<std::mutex> lock(mutex_); }
    changed_.notify_all();
}

void Team::run(Work work) {
    const auto run = std::make_shared<Worker::Run>(std::move(work), size());
    if (!threads_.empty()) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            current_ = run;
        }
        round_.fetch_add(1);
        wake();
    }
    Worker worker(*this, *run, 0);
    run->work(worker);
}

void Team::loop(int index) {
    uint64_t seen = 0;
    while (true) {
        wait([&] { return round_.load() != seen; });
        std::shared_ptr<Worker::Run> run;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (closed_) return;
            seen = round_.load();
            run = current_;
        }
        if (!run) continue;
        Worker worker(*this, *run, index);
        run->work(worker);
    }
}

}  // namespace everstream
