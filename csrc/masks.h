// Masks of a packed row: which keys each query sees, and the blocks of them for FlexAttention.
// Knows neither Python nor torch. All memory of results is the caller's.
#pragma once

#include <cstdint>
#include <vector>

namespace omniload {

enum class MaskKind { kCausal, kFull, kPrefix };

// A packed row and what its tokens see. `starts` has num_documents + 1 places, `spans` 2 numbers an
// image, [start, end) in the row; images count in kPrefix only. A window of 0 is none.
struct MaskRow {
  const std::int32_t* starts;
  std::int64_t num_documents;
  const std::int32_t* spans;
  std::int64_t num_spans;
  std::int64_t num_tokens;
  MaskKind kind;
  std::int64_t window;
};

// Keys of the first and of the last query of a block. Since neither lo nor hi ever falls, they say
// it all.
struct BlockEdges {
  std::int32_t first_lo, first_hi, last_lo, last_hi;
};

// Blocks [first, end) are not empty, of them [full_first, full_end) are full.
struct BlockRange {
  std::int32_t first, end, full_first, full_end;
  std::int64_t num_full() const { return full_end - full_first; }
  std::int64_t num_partial() const { return end - first - num_full(); }
};

// Places of the lists of partial and of full blocks.
struct ListWidths {
  std::int64_t partial, full;
};

// Throws std::invalid_argument unless documents and images lie in order, each image inside one
// document, and the row ends with its last token.
void check_mask_row(const MaskRow& row);

// Writes for each query its keys [lo, hi), num_tokens each, and notes those of the first and the
// last query of each block of `q_block`. The row must have been checked. `edges` has one place for
// each block already: the tokens divided by it, rounded up.
void write_intervals(const MaskRow& row, std::int64_t q_block, std::int32_t* lo, std::int32_t* hi,
                     std::vector<BlockEdges>& edges) noexcept;

// Finds the blocks that the queries of each block of `q_block` see (`rows`), and those that see the
// keys of each block of `kv_block` (`columns`). Both vectors have the right size already.
void find_blocks(const std::vector<BlockEdges>& edges, std::int64_t num_tokens,
                 std::int64_t q_block, std::int64_t kv_block, std::vector<BlockRange>& rows,
                 std::vector<BlockRange>& columns) noexcept;

// The least widths that have room for all lists.
ListWidths longest(const std::vector<BlockRange>& lines) noexcept;

// The numbers that `write_lists` writes: for each line two counts and both lists.
// Throws std::bad_alloc if they can't be counted.
std::int64_t num_list_values(std::int64_t num_lines, const ListWidths& widths);

// Writes the counts of partial blocks, their lists, the counts of full blocks, their lists; each
// list is filled up with 0. `need` is what `longest` says, `widths` are no less. Returns the place
// after the last number.
std::int32_t* write_lists(const std::vector<BlockRange>& lines, const ListWidths& need,
                          const ListWidths& widths, std::int32_t* out) noexcept;

}  // namespace omniload
