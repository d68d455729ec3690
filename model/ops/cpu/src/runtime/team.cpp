#include "runtime/team.h"

#include <cassert>
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

// The tasks of one run that were taken and finished, by phase.
struct Worker::Run {
    struct alignas(64) Phase {
        std::atomic<int> taken{0};
        std::atomic<int> finished{0};
    };
    Run(Team::Work w, int num) : work(std::move(w)), phases(new Phase[size_t(num)]), num_phases(num) {}

    Team::Work work;
    std::unique_ptr<Phase[]> phases;
    int num_phases;
};

int Worker::count() const { return team_.size(); }

int Worker::claim(int num_tasks) {
    assert(phase_ < run_.num_phases);
    std::atomic<int>& taken = run_.phases[size_t(phase_)].taken;
    if (taken.load(std::memory_order_relaxed) >= num_tasks) return num_tasks;
    return taken.fetch_add(1, std::memory_order_relaxed);
}

void Worker::finish(int num_tasks) {
    if (run_.phases[size_t(phase_)].finished.fetch_add(1) + 1 == num_tasks) team_.wake();
}

void Worker::wait(int num_tasks) {
    const std::atomic<int>& finished = run_.phases[size_t(phase_)].finished;
    team_.wait([&] { return finished.load() >= num_tasks; });
}

Team::Team(int num_threads, int max_phases) : max_phases_(max_phases) {
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
    const auto run = std::make_shared<Worker::Run>(std::move(work), max_phases_);
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
