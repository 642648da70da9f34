// Attention of one tile of query rows over a row's pages. attention.cc includes this file once for each instruction
// set, in a namespace of its own and with TARGET and INLINE defined.
//
// The walk over blocks of kv positions with a running softmax is that of FlashAttention-2 (Dao 2023); the tile's
// scores, and its weighted values, are products of the tile with a panel. A panel holds a block's keys or values in
// words of 32 bits: a word has the numbers of one result that are summed up one after the other (two of bfloat16, one
// of float32), and a row of the panel has the words of all results. Blocks begin at multiples of kBlock of the row's
// positions, and a block that a query does not see changes none of its numbers, so that of finite keys and values a
// query's result depends neither on the queries beside it nor on the thread.
//
// Other loops over numbers are written so that compilers make vectors of them.

template <class Kind>
constexpr int kPerWord = sizeof(uint32_t) / sizeof(typename Kind::Number);

// ---- numbers

INLINE float to_float(float number) { return number; }

INLINE float to_float(uint16_t bfloat16) { return bits_to_float(static_cast<uint32_t>(bfloat16) << 16); }

INLINE float to_float(int8_t number) { return number; }

// Subnormal numbers are multiples of 2^-9: widening their bits would make subnormal float32 numbers, which are flushed.
INLINE float to_float(Float8 number) {
  const uint32_t magnitude = number.bits & 0x7f;
  const float normal = bits_to_float((magnitude << 20) + (120u << 23));
  const float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f;
  const float found = magnitude < 8 ? subnormal : normal;
  const float value = magnitude == 0x7f ? std::numeric_limits<float>::quiet_NaN() : found;
  return bits_to_float(float_to_bits(value) | static_cast<uint32_t>(number.bits & 0x80) << 24);
}

// Stores a number that has no more digits than the type.
INLINE void store(float value, float& to) { to = value; }

INLINE void store(float value, uint16_t& to) { to = static_cast<uint16_t>(float_to_bits(value) >> 16); }

// ---- vectors: a compiler's own, which have operators, and masks of -1 for true and 0 for false

using Floats = float __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));
using Halves = uint16_t __attribute__((vector_size(2 * kLanes)));

INLINE Floats all(float number) { return number - Floats{}; }

INLINE Floats load(const float* from) {
  Floats floats;
  std::memcpy(&floats, from, sizeof floats);
  return floats;
}

INLINE void store(Floats floats, float* to) { std::memcpy(to, &floats, sizeof floats); }

// Rounds to the nearest bfloat16 numbers, to the even one of two.
INLINE void store(Floats floats, uint16_t* to) {
  const Words bits = (Words)floats;
  const Words rounded = bits + 0x7fff + (bits >> 16 & 1);
  const Words kept = floats != floats ? Words{} + 0x7fc00000 : rounded;  // carrying, a NaN would become 0
  const Halves halves = __builtin_convertvector(kept >> 16, Halves);
  std::memcpy(to, &halves, sizeof halves);
}

// The exponential function for arguments up to 0, to 2 units in the last place; 0 below -87. By powers of two, and a
// polynomial (Cephes) for what is left.
INLINE Floats exponential(Floats x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves no digits behind the point
  const Floats bounded = x < -87.0f ? all(-87.0f) : x;  // a NaN stays
  const Floats shifted = bounded * 1.44269504f + kRound;  // its last bits are the power of two
  const Floats power = shifted - kRound;
  const Floats rest = (bounded - power * 0.693359375f) + power * 2.12194440e-4f;
  Floats sum = all(1.9875691500e-4f);
  sum = sum * rest + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
  const Floats scale = (Floats)(((Words)shifted + 127) << 23);
  return x < -87.0f ? Floats{} : sum * scale;
}

// cap * tanh(score / cap)
INLINE Floats capped(Floats score, float cap) {
  const Floats size = (Floats)((Words)score & 0x7fffffff);
  const Floats twice = size * (2.0f / cap);
  const Floats shrunk = exponential(twice > 80.0f ? all(-80.0f) : -twice);
  const Floats result = cap * ((1.0f - shrunk) / (1.0f + shrunk));
  return (Floats)((Words)result | ((Words)score & 0x80000000));
}

// ---- panels

struct Panel {
  const uint32_t* words;  // [depth, width]
  int64_t depth;          // words that a sum has
  int64_t width;          // results, a multiple of kLanes
};

// Rows whose products with a panel are wanted: the numbers of each, one after the other.
template <class Kind>
struct Rows {
  const typename Kind::Number* const* numbers;
  int64_t count;
};

template <class Kind>
INLINE typename Kind::Vector words_at(const uint32_t* from) {
  return Kind::whole(reinterpret_cast<const typename Kind::Number*>(from));
}

// to[row] = to[row] * decay[row] + rows[row] times the panel, for a block of rows and vectors of results.
template <class Kind, int kRows, int kVectors>
TARGET void add_block(const Rows<Kind>& rows, const Panel& panel, float* to, const float* decay, int64_t row,
                      int64_t first) {
  typename Kind::Sum sums[kRows][kVectors];
  for (int r = 0; r < kRows; r++)
    for (int v = 0; v < kVectors; v++)
      sums[r][v] = scaled(to + (row + r) * panel.width + first + v * kLanes, decay[row + r]);
  for (int64_t word = 0; word < panel.depth; word++) {
    typename Kind::Operand columns[kVectors];
    for (int v = 0; v < kVectors; v++)
      columns[v] = Kind::of_weight(words_at<Kind>(panel.words + word * panel.width + first + v * kLanes));
    for (int r = 0; r < kRows; r++) {
      const auto x = Kind::of_row(Kind::word(rows.numbers[row + r] + word * kPerWord<Kind>));
      for (int v = 0; v < kVectors; v++) sums[r][v] = Kind::add(sums[r][v], columns[v], x);
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int v = 0; v < kVectors; v++)
      store_floats(to + (row + r) * panel.width + first + v * kLanes, sums[r][v]);
}

template <class Kind, int kRows>
TARGET void add_rows(const Rows<Kind>& rows, const Panel& panel, float* to, const float* decay, int64_t row) {
  int64_t first = 0;
  for (; first + kPanelVectors * kLanes <= panel.width; first += kPanelVectors * kLanes)
    add_block<Kind, kRows, kPanelVectors>(rows, panel, to, decay, row, first);
  for (; first < panel.width; first += kLanes) add_block<Kind, kRows, 1>(rows, panel, to, decay, row, first);
}

// The rows that are fewer than a whole block has.
template <class Kind, int kRows>
TARGET void add_last_rows(const Rows<Kind>& rows, const Panel& panel, float* to, const float* decay, int64_t row) {
  if constexpr (kRows > 0) {
    if (rows.count - row == kRows) add_rows<Kind, kRows>(rows, panel, to, decay, row);
    else add_last_rows<Kind, kRows - 1>(rows, panel, to, decay, row);
  }
}

template <class Kind>
TARGET void add_product(const Rows<Kind>& rows, const Panel& panel, float* to, const float* decay) {
  int64_t row = 0;
  for (; row + kPanelRows <= rows.count; row += kPanelRows)
    add_rows<Kind, kPanelRows>(rows, panel, to, decay, row);
  add_last_rows<Kind, kPanelRows - 1>(rows, panel, to, decay, row);
}

// Where the tokens of a block's positions lie: indices among the [P, K, Z] of the pages; kNowhere where no query looks.
using Places = int64_t[kBlock];
constexpr int64_t kNowhere = -1;

// Numbers of the next block, which are asked for while this one's are packed: the processor itself does not read ahead
// from one page to another. They go to the second level of the cache; many requests at once would be dropped.
struct Ahead {
  const char* pool;
  const int64_t* places;
  int64_t bytes;  // of a token

  INLINE void fetch(int64_t first, int64_t count) const {
    for (int64_t s = first; s < first + count; s++) {
      const char* from = pool + std::max<int64_t>(places[s], 0) * bytes;
      for (int64_t byte = 0; byte < bytes; byte += 64) _mm_prefetch(from + byte, _MM_HINT_T1);
    }
  }
};

// Makes the panel [H / kPerWord, kBlock] of keys: each key becomes a column.
template <class Kind>
TARGET void pack_keys(const typename Kind::Number* const* keys, int64_t H, const Ahead& ahead, uint32_t* panel) {
  const int64_t depth = H / kPerWord<Kind>;
  for (int64_t row = 0; row < kBlock; row += kLanes) {
    ahead.fetch(row, kLanes);
    int64_t word = 0;
    for (; word + kLanes <= depth; word += kLanes)
      transpose(keys + row, word * kPerWord<Kind>, panel + word * kBlock + row, kBlock);
    for (; word < depth; word++)
      for (int64_t lane = 0; lane < kLanes; lane++)
        std::memcpy(panel + word * kBlock + row + lane, keys[row + lane] + word * kPerWord<Kind>, sizeof(uint32_t));
  }
}

INLINE uint32_t word_of(uint16_t low, uint16_t high) { return low | static_cast<uint32_t>(high) << 16; }

INLINE uint32_t word_of(float number, float) { return float_to_bits(number); }

// Makes the panel [kBlock / kPerWord, width] of values: numbers of as many tokens come together in a word.
template <class Kind>
TARGET void pack_values(const typename Kind::Number* const* values, int64_t V, int64_t width, const Ahead& ahead,
                        uint32_t* panel) {
  for (int64_t row = 0; row < kBlock; row += kPerWord<Kind>, panel += width) {
    ahead.fetch(row, kPerWord<Kind>);
    const auto* low = values[row];
    const auto* high = values[row + kPerWord<Kind> - 1];
    for (int64_t v = 0; v < V; v++) panel[v] = word_of(low[v], high[v]);
    for (int64_t v = V; v < width; v++) panel[v] = 0;
  }
}

// ---- the walk

// A tile's query rows and what has been found for them so far.
template <class Kind>
struct Walk {
  using Number = typename Kind::Number;
  Walk(int64_t count, int64_t H, int64_t width)
      : queries(count), positions(count), peak(count), total(count), decay(count), nothing(count),
        sums(count * width), scores(count * kBlock), weights(count * kBlock), weight_rows(count),
        key_scales(kBlock), value_scales(kBlock), zeros(H), converted(kBlock * H), numbers(kBlock),
        key_panel(H / kPerWord<Kind> * kBlock), value_panel(kBlock / kPerWord<Kind> * width) {
    for (int64_t m = 0; m < count; m++) weight_rows[m] = weights.data() + m * kBlock;
  }
  std::vector<const Number*> queries;
  std::vector<int64_t> positions;
  std::vector<float> peak, total, decay, nothing;
  std::vector<float> sums;    // [M, width], of values
  std::vector<float> scores;  // [M, kBlock]
  std::vector<Number> weights;
  std::vector<const Number*> weight_rows;
  std::vector<float> key_scales, value_scales;
  std::vector<Number> zeros, converted;
  std::vector<const Number*> numbers;  // of each position of the block
  std::vector<uint32_t> key_panel, value_panel;
};

// Positions that one of the tile's queries sees, within a block.
struct Span {
  int64_t first, last;  // the last one is not seen
};

template <class Kind, class Stored>
TARGET void find_places(const Attention<Kind, Stored>& a, const Tile& tile, int64_t block, const Span& seen,
                        Places& places) {
  std::fill(places, places + kBlock, kNowhere);
  for (int64_t s = std::max<int64_t>(seen.first, 0), last = std::min(seen.last, kBlock); s < last;) {
    const int64_t page = std::clamp<int64_t>(a.tables[tile.row * a.W + (block + s) / a.Z], 0, a.P - 1);
    const int64_t offset = (block + s) % a.Z;
    const int64_t first = (page * a.K + tile.head) * a.Z + offset;
    const int64_t count = std::min(a.Z - offset, last - s);
    for (int64_t i = 0; i < count; i++) places[s + i] = first + i;
    s += count;
  }
}

// Finds the numbers of a block's positions, as Kind has them; zeros where no query looks, since there may be NaN.
template <class Kind, class Stored>
TARGET void find_numbers(const Attention<Kind, Stored>& a, const Stored* pool, const Places& places,
                         Walk<Kind>& walk) {
  for (int64_t s = 0; s < kBlock; s++) {
    const Stored* stored = pool + places[s] * a.H;
    if (places[s] == kNowhere) {
      walk.numbers[s] = walk.zeros.data();
    } else if constexpr (std::is_same_v<Stored, typename Kind::Number>) {
      walk.numbers[s] = stored;
    } else {
      auto* converted = walk.converted.data() + s * a.H;
      for (int64_t h = 0; h < a.H; h++) store(to_float(stored[h]), converted[h]);
      walk.numbers[s] = converted;
    }
  }
}

TARGET void find_scales(const float* pool, const Places& places, std::vector<float>& scales) {
  for (int64_t s = 0; s < kBlock; s++) scales[s] = places[s] == kNowhere ? 0.0f : pool[places[s]];
}

// Turns a query's products with the block's keys into weights, and goes on with its softmax.
template <class Kind, class Stored>
TARGET void weigh(const Attention<Kind, Stored>& a, int64_t m, int64_t block, Walk<Kind>& walk) {
  float* scores = walk.scores.data() + m * kBlock;
  auto* weights = walk.weights.data() + m * kBlock;
  const int32_t first = static_cast<int32_t>(std::max<int64_t>(a.first_seen(walk.positions[m]) - block, 0));
  const int32_t last = static_cast<int32_t>(std::min<int64_t>(walk.positions[m] - block, kBlock - 1));
  Ints lanes;
  for (int lane = 0; lane < kLanes; lane++) lanes[lane] = lane;
  Floats peaks = all(walk.peak[m]);
  for (int s = 0; s < kBlock; s += kLanes) {
    Floats score = load(scores + s);
    if constexpr (kIsScaled<Stored>) score *= load(walk.key_scales.data() + s);
    score *= a.scale;
    if (a.softcap > 0) score = capped(score, a.softcap);
    const Ints is_seen = (lanes + s >= first) & (lanes + s <= last);
    score = is_seen ? score : all(kMasked);
    store(score, scores + s);
    peaks = score > peaks ? score : peaks;
  }
  float peak = peaks[0];
  for (int lane = 1; lane < kLanes; lane++) peak = std::max(peak, peaks[lane]);
  Floats totals = {};
  for (int s = 0; s < kBlock; s += kLanes) {
    const Ints is_seen = (lanes + s >= first) & (lanes + s <= last);
    Floats weight = is_seen ? exponential(load(scores + s) - peak) : Floats{};
    totals += weight;
    if constexpr (kIsScaled<Stored>) weight *= load(walk.value_scales.data() + s);
    store(weight, weights + s);
  }
  float total = 0;
  for (int lane = 0; lane < kLanes; lane++) total += totals[lane];
  walk.decay[m] = exponential(all(walk.peak[m] - peak))[0];
  walk.total[m] = walk.total[m] * walk.decay[m] + total;
  walk.peak[m] = peak;
}

template <class Kind, class Stored>
TARGET void attend_block(const Attention<Kind, Stored>& a, const Tile& tile, int64_t block, const Places& places,
                         const Places& next, int64_t width, Walk<Kind>& walk) {
  const int64_t count = tile.count;
  if constexpr (kIsScaled<Stored>) {
    find_scales(a.k_scale, places, walk.key_scales);
    find_scales(a.v_scale, places, walk.value_scales);
  }
  find_numbers(a, a.k, places, walk);
  const int64_t token = a.H * static_cast<int64_t>(sizeof(Stored));
  const Ahead next_keys = {reinterpret_cast<const char*>(a.k), next, token};
  pack_keys<Kind>(walk.numbers.data(), a.H, next_keys, walk.key_panel.data());
  const Panel keys = {walk.key_panel.data(), a.H / kPerWord<Kind>, kBlock};
  add_product<Kind>({walk.queries.data(), count}, keys, walk.scores.data(), walk.nothing.data());
  for (int64_t m = 0; m < count; m++) weigh(a, m, block, walk);
  if (a.v != a.k) find_numbers(a, a.v, places, walk);
  const Ahead next_values = {reinterpret_cast<const char*>(a.v), next, a.v == a.k ? 0 : token};
  pack_values<Kind>(walk.numbers.data(), a.V, width, next_values, walk.value_panel.data());
  const Panel values = {walk.value_panel.data(), kBlock / kPerWord<Kind>, width};
  add_product<Kind>({walk.weight_rows.data(), count}, values, walk.sums.data(), walk.decay.data());
}

template <class Kind, class Stored>
TARGET void begin(const Attention<Kind, Stored>& a, const Tile& tile, Walk<Kind>& walk) {
  for (int64_t m = 0; m < tile.count; m++) {
    walk.queries[m] = a.q + a.query(tile, m) * a.H;
    walk.positions[m] = a.position(tile, m);
    walk.peak[m] = a.sinks[a.query(tile, m) % a.N];
    walk.total[m] = walk.peak[m] > kMasked ? 1.0f : 0.0f;
  }
}

template <class Kind, class Stored>
TARGET void finish(const Attention<Kind, Stored>& a, const Tile& tile, int64_t width, const Walk<Kind>& walk) {
  for (int64_t m = 0; m < tile.count; m++) {
    const float total = walk.total[m] == 0 ? 1.0f : walk.total[m];  // a NaN stays, so that it is noticed
    const float* sums = walk.sums.data() + m * width;
    float* out = a.out + a.query(tile, m) * a.V;
    for (int64_t v = 0; v < a.V; v++) out[v] = sums[v] / total;
    a.lse[a.query(tile, m)] =
        walk.positions[m] < 0 ? -std::numeric_limits<float>::infinity() : walk.peak[m] + std::log(total);
  }
}

template <class Kind, class Stored>
TARGET void attend(const Attention<Kind, Stored>& a, const Tile& tile) {
  const int64_t width = (a.V + kLanes - 1) / kLanes * kLanes;
  Walk<Kind> walk(tile.count, a.H, width);
  begin(a, tile, walk);
  const int64_t end = std::min(walk.positions.back() + 1, a.W * a.Z);
  const int64_t first = std::min(a.first_seen(walk.positions.front()), end);
  const int64_t start = first / kBlock * kBlock;
  Places places[2];
  find_places(a, tile, start, {first - start, end - start}, places[0]);
  for (int64_t block = start, turn = 0; block < end; block += kBlock, turn ^= 1) {
    const int64_t next = block + kBlock;
    find_places(a, tile, next, {0, end - next}, places[turn ^ 1]);
    attend_block(a, tile, block, places[turn], places[turn ^ 1], width, walk);
  }
  finish(a, tile, width, walk);
}
