#include "resize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "tiles.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define OMNILOAD_AVX2 __attribute__((target("avx2")))
#include <immintrin.h>
#endif

namespace omniload {
namespace {

constexpr std::int64_t kChannels = 3;
// Taps of a group: a vector of 16 bytes holds four pixels.
constexpr std::int64_t kGroup = 4;
// Source rows that are taken at once through the first pass.
constexpr std::int64_t kRows = 4;
// Bytes after a row that vector code may read or write without meaning.
constexpr std::int64_t kSlack = 64;

double cubic(double x) {
  constexpr double a = -0.5;
  x = std::fabs(x);
  if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0;
  if (x < 2.0) return (((x - 5.0) * x + 8.0) * x - 4.0) * a;
  return 0.0;
}

// For each place of the result, the places of the source that it is made of, and their weights.
struct Taps {
  std::vector<std::int64_t> first, count;
  std::vector<std::int16_t> weights;  // `stride` a place, zero behind `count`
  std::int64_t stride = 0;            // a multiple of kGroup
  int precision = 0;                  // bits behind the point

  Taps(std::int64_t source, std::int64_t target)
      : first(static_cast<std::size_t>(target)), count(static_cast<std::size_t>(target)) {
    const double scale = static_cast<double>(source) / static_cast<double>(target);
    const double support = scale >= 1.0 ? 2.0 * scale : 2.0;
    const double inverse = scale >= 1.0 ? 1.0 / scale : 1.0;
    const auto most = static_cast<std::int64_t>(std::ceil(support)) * 2 + 1;
    stride = (most + kGroup - 1) / kGroup * kGroup;
    std::vector<double> exact(static_cast<std::size_t>(target * stride), 0.0);
    double largest = 0.0;
    for (std::int64_t i = 0; i < target; ++i) {
      const double center = scale * (static_cast<double>(i) + 0.5);
      const auto low = std::max<std::int64_t>(static_cast<std::int64_t>(center - support + 0.5), 0);
      const auto high = std::min(static_cast<std::int64_t>(center + support + 0.5), source);
      const auto taps = std::clamp<std::int64_t>(high - low, 0, most);
      double* values = exact.data() + i * stride;
      double total = 0.0;
      for (std::int64_t j = 0; j < taps; ++j) {
        values[j] = cubic((static_cast<double>(j + low) - center + 0.5) * inverse);
        total += values[j];
      }
      for (std::int64_t j = 0; j < taps; ++j) {
        if (total != 0.0) values[j] /= total;
        largest = std::max(largest, values[j]);
      }
      first[static_cast<std::size_t>(i)] = low;
      count[static_cast<std::size_t>(i)] = taps;
    }
    // as many bits as the largest weight leaves in 16
    while (precision < 22 &&
           static_cast<int>(0.5 + largest * static_cast<double>(1 << (precision + 1))) < 1 << 15) {
      ++precision;
    }
    weights.resize(exact.size());
    for (std::size_t i = 0; i < exact.size(); ++i) {
      const double value = exact[i] * static_cast<double>(1 << precision);
      weights[i] = static_cast<std::int16_t>(value < 0.0 ? value - 0.5 : value + 0.5);
    }
  }

  std::int64_t most() const { return *std::max_element(count.begin(), count.end()); }
  std::int64_t first_of(std::int64_t i) const { return first[static_cast<std::size_t>(i)]; }
  std::int64_t count_of(std::int64_t i) const { return count[static_cast<std::size_t>(i)]; }
  const std::int16_t* weights_of(std::int64_t i) const { return weights.data() + i * stride; }
};

std::uint8_t rounded(std::int32_t sum, int precision) {
  return static_cast<std::uint8_t>(std::clamp(sum >> precision, 0, 255));
}

void along_row(const std::uint8_t* line, const Taps& taps, std::uint8_t* out) {
  const auto width = static_cast<std::int64_t>(taps.first.size());
  for (std::int64_t x = 0; x < width; ++x) {
    const std::int16_t* weights = taps.weights_of(x);
    const std::uint8_t* pixel = line + taps.first_of(x) * kChannels;
    for (std::int64_t c = 0; c < kChannels; ++c) {
      std::int32_t sum = 1 << (taps.precision - 1);
      for (std::int64_t j = 0; j < taps.count_of(x); ++j) {
        sum += weights[j] * pixel[j * kChannels + c];
      }
      out[x * kChannels + c] = rounded(sum, taps.precision);
    }
  }
}

void across_rows(const std::uint8_t* const* lines, const std::int16_t* weights, std::int64_t count,
                 int precision, std::int64_t begin, std::int64_t end, std::uint8_t* out) {
  for (std::int64_t x = begin; x < end; ++x) {
    std::int32_t sum = 1 << (precision - 1);
    for (std::int64_t j = 0; j < count; ++j) sum += weights[j] * lines[j][x];
    out[x] = rounded(sum, precision);
  }
}

#ifdef OMNILOAD_AVX2

// Four taps of one row: bytes of 4 pixels to sums of red, green, blue in both halves.
OMNILOAD_AVX2 inline __m256i add_group(__m256i sums, const std::uint8_t* pixels, __m256i weights,
                                       __m256i order) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(pixels));
  const __m256i pairs = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bytes), order);
  return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, weights));
}

OMNILOAD_AVX2 inline __m128i both_halves(__m256i sums, __m128i shift) {
  const __m128i total =
      _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  return _mm_sra_epi32(total, shift);
}

// Four rows at once; each may be read 16 bytes, and written one byte, beyond its end.
OMNILOAD_AVX2 void along_four_rows(const std::uint8_t* const* lines, const Taps& taps,
                                   std::uint8_t* const* out) {
  // low half: pixels 0 and 1, high half: 2 and 3; each channel of a pair side by side as 16 bits
  const __m256i order = _mm256_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1,
                                         6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1);
  const __m256i spread = _mm256_setr_epi8(0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3,
                                          4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7);
  const __m128i shift = _mm_cvtsi32_si128(taps.precision);
  const __m256i half =
      _mm256_inserti128_si256(_mm256_setzero_si256(), _mm_set1_epi32(1 << (taps.precision - 1)), 0);
  const auto width = static_cast<std::int64_t>(taps.first.size());
  for (std::int64_t x = 0; x < width; ++x) {
    const std::int16_t* weights = taps.weights_of(x);
    const std::int64_t at = taps.first_of(x) * kChannels;
    const std::int64_t count = taps.count_of(x);
    __m256i sums[kRows] = {half, half, half, half};
    for (std::int64_t j = 0; j < count; j += kGroup) {
      std::int64_t four;
      std::memcpy(&four, weights + j, sizeof four);
      const __m256i pairs = _mm256_shuffle_epi8(_mm256_set1_epi64x(four), spread);
      const std::int64_t from = at + j * kChannels;
      sums[0] = add_group(sums[0], lines[0] + from, pairs, order);
      sums[1] = add_group(sums[1], lines[1] + from, pairs, order);
      sums[2] = add_group(sums[2], lines[2] + from, pairs, order);
      sums[3] = add_group(sums[3], lines[3] + from, pairs, order);
    }
    const __m128i first = _mm_packs_epi32(both_halves(sums[0], shift), both_halves(sums[1], shift));
    const __m128i last = _mm_packs_epi32(both_halves(sums[2], shift), both_halves(sums[3], shift));
    const __m128i pixels = _mm_packus_epi16(first, last);
    std::uint32_t values[kRows];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(values), pixels);
    for (std::int64_t row = 0; row < kRows; ++row) {
      std::memcpy(out[row] + x * kChannels, values + row, sizeof values[row]);
    }
  }
}

// 32 bytes at a time; what is left is for the portable code. Returns where that begins.
OMNILOAD_AVX2 std::int64_t across_rows_wide(const std::uint8_t* const* lines,
                                            const std::int16_t* weights, std::int64_t count,
                                            int precision, std::int64_t end, std::uint8_t* out) {
  const __m128i shift = _mm_cvtsi32_si128(precision);
  const __m256i half = _mm256_set1_epi32(1 << (precision - 1));
  const __m256i zero = _mm256_setzero_si256();
  std::int64_t x = 0;
  for (; x + 32 <= end; x += 32) {
    __m256i sums[4] = {half, half, half, half};
    for (std::int64_t j = 0; j < count; j += 2) {
      // an odd last row goes with itself, at the weight 0 that stands behind the last
      const std::uint8_t* below = lines[j + 1 < count ? j + 1 : j];
      std::int32_t two;
      std::memcpy(&two, weights + j, sizeof two);
      const __m256i pair = _mm256_set1_epi32(two);
      const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lines[j] + x));
      const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(below + x));
      const __m256i low = _mm256_unpacklo_epi8(a, b);
      const __m256i high = _mm256_unpackhi_epi8(a, b);
      const __m256i parts[4] = {_mm256_unpacklo_epi8(low, zero), _mm256_unpackhi_epi8(low, zero),
                                _mm256_unpacklo_epi8(high, zero), _mm256_unpackhi_epi8(high, zero)};
      for (int part = 0; part < 4; ++part) {
        sums[part] = _mm256_add_epi32(sums[part], _mm256_madd_epi16(parts[part], pair));
      }
    }
    for (__m256i& sum : sums) sum = _mm256_sra_epi32(sum, shift);
    const __m256i bytes = _mm256_packus_epi16(_mm256_packs_epi32(sums[0], sums[1]),
                                              _mm256_packs_epi32(sums[2], sums[3]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + x), bytes);
  }
  return x;
}

#endif

// The source after the first pass, as far as it is needed: a ring of rows.
class Lines {
 public:
  Lines(const std::uint8_t* image, std::int64_t height, std::int64_t width, std::int64_t target,
        std::int64_t depth, bool use_vectors)
      : image_(image),
        height_(height),
        width_(width),
        use_vectors_(use_vectors),
        is_plain_(width == target) {
    if (is_plain_) return;
    taps_ = std::make_unique<const Taps>(width, target);
    depth_ = depth + kRows;
    stride_ = target * kChannels + kSlack;
    ring_.resize(static_cast<std::size_t>(depth_ * stride_));
    tail_.resize(static_cast<std::size_t>(kRows * (width * kChannels + kSlack)));
  }

  // Makes all rows before `end`; those more than `depth` before it may be gone.
  void make(std::int64_t end) {
    if (is_plain_) return;
    for (; made_ < end; made_ += kRows) four(std::min(kRows, height_ - made_));
  }

  const std::uint8_t* operator[](std::int64_t row) const {
    if (is_plain_) return image_ + row * width_ * kChannels;
    return ring_.data() + row % depth_ * stride_;
  }

 private:
  void four(std::int64_t count) {
    const std::uint8_t* lines[kRows];
    std::uint8_t* out[kRows];
    for (std::int64_t i = 0; i < kRows; ++i) {
      const std::int64_t row = made_ + std::min(i, count - 1);
      lines[i] = readable(row, i);
      out[i] = ring_.data() + (made_ + i) % depth_ * stride_;
    }
#ifdef OMNILOAD_AVX2
    if (use_vectors_) {
      along_four_rows(lines, *taps_, out);
      return;
    }
#endif
    for (std::int64_t i = 0; i < count; ++i) along_row(lines[i], *taps_, out[i]);
  }

  // A row that may be read beyond its end: one near the end of the image is copied.
  const std::uint8_t* readable(std::int64_t row, std::int64_t slot) {
    const std::int64_t bytes = width_ * kChannels;
    const std::uint8_t* line = image_ + row * bytes;
    if ((height_ - row - 1) * bytes >= kSlack) return line;
    std::uint8_t* copy = tail_.data() + slot * (bytes + kSlack);
    std::memcpy(copy, line, static_cast<std::size_t>(bytes));
    return copy;
  }

  const std::uint8_t* image_;
  std::int64_t height_, width_;
  bool use_vectors_, is_plain_;
  std::int64_t depth_ = 0, stride_ = 0, made_ = 0;
  std::unique_ptr<const Taps> taps_;
  std::vector<std::uint8_t> ring_, tail_;
};

}  // namespace

bool resize_is_quick() noexcept {
#ifdef OMNILOAD_AVX2
  return __builtin_cpu_supports("avx2") != 0;
#else
  return false;
#endif
}

void resize(const std::uint8_t* image, std::int64_t height, std::int64_t width,
            std::int64_t columns, std::int64_t rows, std::int64_t tile_height,
            std::int64_t tile_width, bool planar, bool use_vectors, std::uint8_t* out) {
  use_vectors = use_vectors && resize_is_quick();
  const std::int64_t target_height = rows * tile_height, target_width = columns * tile_width;
  const bool keeps_rows = height == target_height;
  const Taps taps = keeps_rows ? Taps(1, 1) : Taps(height, target_height);
  Lines lines(image, height, width, target_width, keeps_rows ? 1 : taps.most(), use_vectors);
  const std::int64_t bytes = target_width * kChannels;
  std::vector<std::uint8_t> row(static_cast<std::size_t>(planar ? bytes : 0));
  std::vector<const std::uint8_t*> window;
  for (std::int64_t y = 0; y < target_height; ++y) {
    const std::uint8_t* line;
    std::uint8_t* target = planar ? row.data() : out + y * bytes;
    if (keeps_rows) {
      lines.make(y + 1);
      line = lines[y];
      if (!planar) std::memcpy(target, line, static_cast<std::size_t>(bytes));
    } else {
      const std::int64_t first = taps.first_of(y), count = taps.count_of(y);
      lines.make(first + count);
      window.resize(static_cast<std::size_t>(count));
      for (std::int64_t j = 0; j < count; ++j) {
        window[static_cast<std::size_t>(j)] = lines[first + j];
      }
      std::int64_t done = 0;
      const std::int16_t* weights = taps.weights_of(y);
#ifdef OMNILOAD_AVX2
      if (use_vectors) {
        done = across_rows_wide(window.data(), weights, count, taps.precision, bytes, target);
      }
#endif
      across_rows(window.data(), weights, count, taps.precision, done, bytes, target);
      line = target;
    }
    if (planar) row_to_tiles(line, columns, y, tile_height, tile_width, out);
  }
}

}  // namespace omniload
