#include "masks.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>

#include "vectors.h"

namespace omniload {
namespace {

// Divides by a block; shifts where that does, since a division takes longer than all the rest.
class Divider {
 public:
  explicit Divider(std::int64_t size) : size_(static_cast<std::uint32_t>(size)) {
    if ((size_ & (size_ - 1)) != 0) return;
    for (shift_ = 0; (size_ >> shift_) != 1;) ++shift_;
  }
  std::int32_t down(std::uint32_t value) const {
    return static_cast<std::int32_t>(shift_ < 0 ? value / size_ : value >> shift_);
  }
  // both are below 2^31, so the sum doesn't wrap
  std::int32_t up(std::uint32_t value) const { return down(value + (size_ - 1)); }

 private:
  std::uint32_t size_;
  int shift_ = -1;
};

inline void fill(std::int32_t* out, std::int64_t begin, std::int64_t end, std::int32_t value) {
  for (std::int64_t i = begin; i < end; ++i) out[i] = value;
}

// out[i] = first + i
inline void count_up(std::int32_t* out, std::int64_t begin, std::int64_t end, std::int32_t first) {
  for (std::int64_t i = begin; i < end; ++i) out[i] = first + static_cast<std::int32_t>(i);
}

// The keys of one document's queries, of which there are `length`.
OMNILOAD_VECTORS
void write_document(std::int32_t start, std::int64_t length, bool full, std::int64_t window,
                    std::int32_t* lo, std::int32_t* hi) noexcept {
  // the first `window` tokens see all that is before them, the last all that is after
  const std::int64_t near = window == 0 ? length : std::min(window, length);
  const std::int64_t far = length - near;
  const auto reach = static_cast<std::int32_t>(near);
  fill(lo, 0, near, start);
  count_up(lo, near, length, start + 1 - reach);
  if (full) {
    count_up(hi, 0, far, start + reach);
    fill(hi, far, length, start + static_cast<std::int32_t>(length));
  } else {
    count_up(hi, 0, length, start + 1);
  }
}

// The tokens of an image see all of it.
OMNILOAD_VECTORS
void write_image(std::int32_t start, std::int64_t length, std::int32_t* lo,
                 std::int32_t* hi) noexcept {
  for (std::int64_t i = 0; i < length; ++i) lo[i] = std::min(lo[i], start);
  fill(hi, 0, length, start + static_cast<std::int32_t>(length));
}

// A list of `count` blocks from `first` on, without the `skipped` ones after the first `before`.
struct BlockList {
  std::int32_t first, before, skipped, count;
};

inline BlockList partial_list(const BlockRange& line) {
  const std::int32_t in_full = line.full_end - line.full_first;
  // a line without full blocks has an empty full range anywhere, and skips nothing
  return {line.first, line.full_first - line.first, in_full,
          line.end - line.first - in_full};
}

inline BlockList full_list(const BlockRange& line) {
  const std::int32_t in_full = line.full_end - line.full_first;
  return {line.full_first, in_full, 0, in_full};
}

inline std::int32_t block_at(const BlockList& list, std::int32_t place) {
  const std::int32_t block = list.first + place + (place < list.before ? 0 : list.skipped);
  return place < list.count ? block : 0;
}

// Places written at once: one vector with AVX2, two without.
constexpr std::int32_t kPlaces = 8;
using Places __attribute__((vector_size(4 * kPlaces))) = std::int32_t;

// Writes the counts of the lists, then the lists, of which none is longer than `need`, each filled
// up with 0 to `width`. Whole vectors are written, into the next line too, which comes after; all
// lines run to the same place, since a branch that each takes another time costs more than that.
template <BlockList (*list_of)(const BlockRange&)>
OMNILOAD_VECTORS std::int32_t* fill_section(const BlockRange* lines, std::int64_t num_lines,
                                            std::int64_t need, std::int64_t width,
                                            std::int32_t* out) noexcept {
  std::int32_t* counts = out;
  out += num_lines;
  std::int32_t* const end = out + num_lines * width;
  const auto places = static_cast<std::int32_t>(need);
  const std::int64_t rounded = (need + kPlaces - 1) / kPlaces * kPlaces;
  for (std::int64_t i = 0; i < num_lines; ++i) {
    const BlockList list = list_of(lines[i]);
    counts[i] = list.count;
    if (end - out >= rounded) {
      Places place = {0, 1, 2, 3, 4, 5, 6, 7};
      for (std::int32_t j = 0; j < places; j += kPlaces, place += kPlaces) {
        // a comparison gives all bits or none
        const Places block = list.first + place + (list.skipped & (place >= list.before));
        const Places found = block & (place < list.count);
        std::memcpy(out + j, &found, sizeof(found));
      }
    } else {
      for (std::int32_t j = 0; j < places; ++j) out[j] = block_at(list, j);
    }
    fill(out, need, width, 0);
    out += width;
  }
  return end;
}

}  // namespace

void check_mask_row(const MaskRow& row) {
  bool in_order = row.starts[0] == 0;
  for (std::int64_t i = 0; i < row.num_documents; ++i) {
    in_order = in_order && row.starts[i] <= row.starts[i + 1];
  }
  if (!in_order) throw std::invalid_argument("cu_seqlens must start with 0 and never fall.");
  if (row.starts[row.num_documents] != row.num_tokens) {
    throw std::invalid_argument("cu_seqlens must end with the number of tokens: expected " +
                                std::to_string(row.num_tokens) + ", got " +
                                std::to_string(row.starts[row.num_documents]) + ".");
  }
  std::int64_t document = 0, before = 0;
  for (std::int64_t image = 0; image < row.num_spans; ++image) {
    const std::int64_t start = row.spans[2 * image], end = row.spans[2 * image + 1];
    bool fits = before <= start && start <= end;
    while (fits && document < row.num_documents && row.starts[document + 1] <= start) ++document;
    // an empty span is nowhere, so it may lie anywhere
    fits = fits && (start == end ||
                    (document < row.num_documents && end <= row.starts[document + 1]));
    if (!fits) {
      throw std::invalid_argument("image_spans must lie inside one document each, in order: got [" +
                                  std::to_string(start) + ", " + std::to_string(end) + ") (image " +
                                  std::to_string(image) + ").");
    }
    before = end;
  }
}

void write_intervals(const MaskRow& row, std::int64_t q_block, std::int32_t* lo, std::int32_t* hi,
                     std::vector<BlockEdges>& edges) noexcept {
  const auto num_blocks = static_cast<std::int64_t>(edges.size());
  std::int64_t image = 0, first = 0, last = 0;
  for (std::int64_t i = 0; i < row.num_documents; ++i) {
    const std::int32_t start = row.starts[i], end = row.starts[i + 1];
    if (start == end) continue;
    write_document(start, end - start, row.kind == MaskKind::kFull, row.window, lo + start,
                   hi + start);
    for (; image < row.num_spans && row.spans[2 * image] < end; ++image) {
      const std::int32_t left = row.spans[2 * image], right = row.spans[2 * image + 1];
      if (left < right) write_image(left, right - left, lo + left, hi + left);
    }
    // at once, while the document is in the cache
    for (; first < num_blocks && first * q_block < end; ++first) {
      edges[first].first_lo = lo[first * q_block];
      edges[first].first_hi = hi[first * q_block];
    }
    for (; last < num_blocks; ++last) {
      const std::int64_t query = std::min((last + 1) * q_block, row.num_tokens) - 1;
      if (query >= end) break;
      edges[last].last_lo = lo[query];
      edges[last].last_hi = hi[query];
    }
  }
}

void find_blocks(const std::vector<BlockEdges>& edges, std::int64_t num_tokens,
                 std::int64_t q_block, std::int64_t kv_block, std::vector<BlockRange>& rows,
                 std::vector<BlockRange>& columns) noexcept {
  const auto num_rows = static_cast<std::int64_t>(rows.size());
  // a block that reaches past the last token is not full
  const std::int64_t whole = num_tokens / q_block;
  const Divider keys(kv_block);
  for (std::int64_t i = 0; i < num_rows; ++i) {
    const BlockEdges& edge = edges[i];
    const std::int32_t full_first = keys.up(edge.last_lo);
    const std::int32_t full_end = i < whole ? keys.down(edge.first_hi) : full_first;
    rows[i] = {keys.down(edge.first_lo), keys.up(edge.last_hi), full_first,
               std::max(full_end, full_first)};
  }
  // a column meets a range of rows, whose ends move on from column to column
  std::int64_t first = 0, end = 0, full_first = 0, full_end = 0, key = 0;
  for (BlockRange& column : columns) {
    const std::int64_t next_key = key + kv_block;
    while (first < num_rows && edges[first].last_hi <= key) ++first;
    while (end < num_rows && edges[end].first_lo < next_key) ++end;
    while (full_first < whole && edges[full_first].first_hi < next_key) ++full_first;
    while (full_end < whole && edges[full_end].last_lo <= key) ++full_end;
    column = {static_cast<std::int32_t>(first), static_cast<std::int32_t>(end),
              static_cast<std::int32_t>(full_first),
              static_cast<std::int32_t>(std::max(full_end, full_first))};
    key = next_key;
  }
}

ListWidths longest(const std::vector<BlockRange>& lines) noexcept {
  ListWidths found{0, 0};
  for (const BlockRange& line : lines) {
    found.partial = std::max(found.partial, line.num_partial());
    found.full = std::max(found.full, line.num_full());
  }
  return found;
}

std::int64_t num_list_values(std::int64_t num_lines, const ListWidths& widths) {
  // lines and widths are below 2^31, so the sum is far from the end
  const std::int64_t values = widths.partial + widths.full + 2;
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max() / 32;
  if (num_lines != 0 && values > kMost / num_lines) throw std::bad_alloc();
  return num_lines * values;
}

std::int32_t* write_lists(const std::vector<BlockRange>& lines, const ListWidths& need,
                          const ListWidths& widths, std::int32_t* out) noexcept {
  const auto num_lines = static_cast<std::int64_t>(lines.size());
  out = fill_section<partial_list>(lines.data(), num_lines, need.partial, widths.partial, out);
  return fill_section<full_list>(lines.data(), num_lines, need.full, widths.full, out);
}

}  // namespace omniload
