// A few threads that share the tasks of one run, phase by phase.
//
// Of a phase each thread has a range of its own, so that rows and weights next to each other stay in its
// cache, and helps the others when that is done. No caller waits for a thread, only for tasks that a
// thread has begun: one that another process has pushed aside comes late, finds its phases done and joins
// where the others are. A thread that waits looks for `SPIN_TIME` and then sleeps, so an idle server uses
// no time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace everstream {

class Team;

// One thread's part in a run. All threads go through the same phases in the same order.
class Worker {
public:
    int index() const { return index_; }
    int count() const;

    // The next phase: `task(i)` for each i below `num_tasks`, by any free thread. When it returns
    // all of them are done, by all threads. Only tasks may touch what a run shares.
    template <class Task>
    void each(int num_tasks, Task task) {
        begin_phase(num_tasks);
        int done = 0;
        for (int turn = 0; turn < count(); turn++) {
            const int owner = (index_ + turn) % count();
            const auto begin = int(int64_t(num_tasks) * owner / count());
            const int num = int(int64_t(num_tasks) * (owner + 1) / count()) - begin;
            for (int i; (i = claim(owner, num)) < num; done++) task(begin + i);
        }
        if (done) finish(done);
        wait();
    }

private:
    friend class Team;
    struct Run;
    Worker(Team& team, Run& run, int index) : team_(team), run_(run), index_(index) {}
    void begin_phase(int num_tasks);
    int claim(int owner, int num);
    void finish(int num);
    void wait();

    Team& team_;
    Run& run_;
    int index_;
    uint32_t phase_ = 0;
    int64_t total_ = 0;  // tasks up to the end of the phase
};

class Team {
public:
    using Work = std::function<void(Worker&)>;

    explicit Team(int num_threads);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return int(threads_.size()) + 1; }
    // Runs `work` on all threads, the caller's among them. When it returns every phase is done,
    // but a late thread may still call its own copy of `work`, which then finds no task.
    void run(Work work);

private:
    friend class Worker;

    void loop(int index);
    template <class Ready>
    void wait(Ready ready);
    void wake();

    std::atomic<uint64_t> round_{0};
    std::atomic<int> sleepers_{0};
    std::mutex mutex_;
    std::condition_variable changed_;
    std::shared_ptr<Worker::Run> current_;
    bool closed_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace everstream
