// Where the time of a call goes, if anybody asked: a branch for each part otherwise.
#ifndef HEADRACE_STOPWATCH_H
#define HEADRACE_STOPWATCH_H

#include <chrono>
#include <cstdint>

namespace hr {

class Stopwatch {
 public:
  // nanoseconds[part] grows by what each lap took; null: nobody asked.
  explicit Stopwatch(int64_t* nanoseconds) : nanoseconds_(nanoseconds), last_(nanoseconds ? now() : 0) {}

  void lap(int part) {
    if (!nanoseconds_) return;
    const int64_t time = now();
    nanoseconds_[part] += time - last_;
    last_ = time;
  }

 private:
  static int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  int64_t* nanoseconds_;
  int64_t last_;
};

}  // namespace hr

#endif
