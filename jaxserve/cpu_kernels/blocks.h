// Products by blocks of a few rows and a few outputs. products.cc includes this file once for each instruction set,
// in a namespace of its own and with TARGET and INLINE defined: a template cannot choose its instructions otherwise.
//
// Every sum has one accumulator, to which the steps along K are added in their order. Blocks differ in how many sums
// they hold, not in how one is made, so that a row's results depend neither on the other rows nor on the thread.

template <class Kind>
struct Whole {
  INLINE typename Kind::Vector operator()(const typename Kind::Number* from) const { return Kind::whole(from); }
};

template <class Kind>
struct Part {
  int64_t count;
  INLINE typename Kind::Vector operator()(const typename Kind::Number* from) const { return Kind::part(from, count); }
};

template <class Kind, int kRows, int kOutputs, class Read>
INLINE void add_step(typename Kind::Sum (&sums)[kRows][kOutputs], const typename Kind::Number* x,
                     const typename Kind::Number* w, int64_t K, Read read) {
  typename Kind::Operand rows[kRows];
  for (int r = 0; r < kRows; r++) rows[r] = Kind::of_row(read(x + r * K));
  for (int n = 0; n < kOutputs; n++) {
    const typename Kind::Operand weights = Kind::of_weight(read(w + n * K));
    for (int r = 0; r < kRows; r++) sums[r][n] = Kind::add(sums[r][n], weights, rows[r]);
  }
}

// Asks for weights of the next block: the processor itself does not read ahead from one row of the weight to another.
// They go to the second level of the cache, as the first one is full of this block, and are asked for again with each
// block of rows, as a processor that is busy drops such requests. With it a product takes two thirds of the time.
template <class Kind, int kOutputs>
INLINE void fetch(const typename Kind::Number* next, int64_t K) {
  for (int n = 0; n < kOutputs; n++) _mm_prefetch((const char*)(next + n * K), _MM_HINT_T1);
}

template <class Kind, int kRows, int kOutputs>
TARGET void block(const Product<Kind>& product, const typename Kind::Result* surplus, int64_t row, int64_t output) {
  const int64_t K = product.K;
  const auto* x = product.x + row * K;
  const auto* w = product.weight + output * K;
  const auto* next = output + 2 * kOutputs <= product.N ? w + kOutputs * K : w;
  typename Kind::Sum sums[kRows][kOutputs];
  for (int r = 0; r < kRows; r++)
    for (int n = 0; n < kOutputs; n++) sums[r][n] = Kind::zero();
  int64_t k = 0;
  for (; k + Kind::kStep <= K; k += Kind::kStep) {
    fetch<Kind, kOutputs>(next + k, K);
    add_step<Kind, kRows, kOutputs>(sums, x + k, w + k, K, Whole<Kind>{});
  }
  if (k < K) add_step<Kind, kRows, kOutputs>(sums, x + k, w + k, K, Part<Kind>{K - k});
  for (int r = 0; r < kRows; r++)
    for (int n = 0; n < kOutputs; n++) {
      auto total = Kind::total(sums[r][n]);
      if constexpr (Kind::kMovesWeights) total = wrapped_difference(total, surplus[row + r]);
      product.y[(row + r) * product.N + output + n] = total;
    }
}

// The rows that are fewer than a whole block has.
template <class Kind, int kRows, int kOutputs>
TARGET void last_rows(const Product<Kind>& product, const typename Kind::Result* surplus, int64_t row,
                      int64_t output) {
  if constexpr (kRows > 0) {
    if (product.R - row == kRows) block<Kind, kRows, kOutputs>(product, surplus, row, output);
    else last_rows<Kind, kRows - 1, kOutputs>(product, surplus, row, output);
  }
}

template <class Kind, int kOutputs>
TARGET void all_rows(const Product<Kind>& product, const typename Kind::Result* surplus, int64_t output) {
  int64_t row = 0;
  for (; row + Kind::kRows <= product.R; row += Kind::kRows)
    block<Kind, Kind::kRows, kOutputs>(product, surplus, row, output);
  last_rows<Kind, Kind::kRows - 1, kOutputs>(product, surplus, row, output);
}

// What the totals of each row have too much, where weights are moved; elsewhere nothing.
template <class Kind>
TARGET std::vector<typename Kind::Result> surpluses(const Product<Kind>& product) {
  std::vector<typename Kind::Result> found;
  if constexpr (Kind::kMovesWeights)
    for (int64_t r = 0; r < product.R; r++) found.push_back(Kind::surplus(product.x + r * product.K, product.K));
  return found;
}

// Computes the outputs from first to before last of all rows.
template <class Kind>
TARGET void multiply(const Product<Kind>& product, int64_t first, int64_t last) {
  const auto surplus = surpluses<Kind>(product);
  int64_t output = first;
  for (; output + Kind::kOutputs <= last; output += Kind::kOutputs)
    all_rows<Kind, Kind::kOutputs>(product, surplus.data(), output);
  for (; output < last; output++) all_rows<Kind, 1>(product, surplus.data(), output);
}
