// Numbers as the bits that they have in memory. Each source file includes this file in its own unnamed namespace.

inline __attribute__((always_inline)) float bits_to_float(uint32_t bits) {
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

inline __attribute__((always_inline)) uint32_t float_to_bits(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  return bits;
}

// The word of 32 bits at an address that need not be a multiple of 4.
inline __attribute__((always_inline)) int32_t word_at(const void* from) {
  int32_t word;
  std::memcpy(&word, from, sizeof word);
  return word;
}
