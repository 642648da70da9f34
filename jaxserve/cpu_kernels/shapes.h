// Shapes in error texts. Each source file includes this file in its own unnamed namespace.

inline std::string shape(ffi::Span<const int64_t> dimensions) {
  std::string text;
  for (int64_t size : dimensions) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}
