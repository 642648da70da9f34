// Work of a call that XLA's threads share. Each source file includes this file in its own unnamed namespace.

constexpr int64_t kWorth = 256 << 10;  // bytes that take as long to multiply as a thread takes to come, 5 to 10 us
constexpr int kSpins = 2000;           // turns of waiting before the processor is offered to others

// XLA's settings of floating-point numbers while it lives: threads that others made may have different ones.
class Settings {
 public:
  Settings() : before_(_mm_getcsr()) { _mm_setcsr(kNearest | kFlush); }
  ~Settings() { _mm_setcsr(before_); }

 private:
  static constexpr unsigned kNearest = 0x1f80;  // all exceptions masked
  static constexpr unsigned kFlush = 0x8040;    // subnormal results and operands are zero
  const unsigned before_;
};

struct Shares {
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  std::atomic<bool> failed{false};
};

// Takes shares until none is left. Exceptions must not leave XLA's threads.
template <class Work>
void take(Shares& shares, int64_t count, const Work& work) {
  const Settings settings;
  for (int64_t share; (share = shares.next++) < count;) {
    try {
      work(share);
    } catch (const std::bad_alloc&) {
      shares.failed = true;
    }
    shares.done++;
  }
}

// Waits for shares that others have begun. None can be left that nobody has begun: this thread would have taken it.
inline void wait(const Shares& shares, int64_t count) {
  for (int spins = 0; shares.done < count; spins++) {
    if (spins < kSpins) _mm_pause();
    else std::this_thread::yield();
  }
}

// Calls work(share) for each share below count, on up to so many threads of which this one is the first. Work is
// copied: a thread may come when everything is done, and this call is over.
template <class Work>
ffi::Error share_out(ffi::ThreadPool& pool, int64_t threads, int64_t count, const Work& work) {
  auto shares = std::make_shared<Shares>();
  const int64_t helpers = std::min(threads, count) - 1;
  for (int64_t helper = 0; helper < helpers; helper++) pool.Schedule([=] { take(*shares, count, work); });
  take(*shares, count, work);
  wait(*shares, count);
  if (shares->failed) return ffi::Error(ffi::ErrorCode::kResourceExhausted, "there is no memory for a kernel's numbers");
  return ffi::Error::Success();
}

// Small work is for this thread alone: others would come too late.
inline int64_t useful_threads(ffi::ThreadPool& pool, int64_t bytes) {
  const int64_t worth = bytes / kWorth;
  return worth < 2 ? 1 : std::clamp<int64_t>(pool.num_threads(), 1, worth);
}
