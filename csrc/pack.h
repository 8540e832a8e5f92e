// Packing: samples laid end to end in one row. Knows neither Python nor torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace omniload {

constexpr std::int64_t kIgnoreIndex = -100;
constexpr std::int64_t kMaxTokens = 2147483647;  // cu_seqlens are int32

// One sample's tokens; length >= 1, both arrays have `length` values.
struct Document {
  const std::int32_t* input_ids;
  const std::int32_t* labels;
  std::int64_t length;
};

struct TokenRow {
  std::int64_t* input_ids;
  std::int64_t* labels;
  std::int64_t* position_ids;
  std::int32_t* cu_seqlens;
  std::int64_t num_tokens;   // room in the first three
  std::int64_t num_samples;  // room in cu_seqlens, less one
};

// Each document gets a multiple of so many tokens, of which the last are `token_id` and give no
// loss; what is left of the row is a document of such tokens, what is left of cu_seqlens is empty
// documents.
struct Padding {
  std::int64_t multiple;
  std::int32_t token_id;
};

struct Bytes {
  const std::uint8_t* data;
  std::size_t size;
};

// An Arrow list column: list i is values[offsets[i] .. offsets[i + 1]).
struct ListColumn {
  const std::int32_t* values;
  std::int64_t num_values;
  const void* offsets;
  std::int64_t num_lists;
  bool wide;  // offsets are int64, else int32
};

// Looks up the lists at `rows`. Throws std::invalid_argument for a row outside the columns, a list
// outside the values, an empty list, or labels of another length than the tokens.
std::vector<Document> select(const ListColumn& input_ids, const ListColumn& labels,
                             const std::int64_t* rows, std::size_t num_rows);

// Throws std::invalid_argument unless the row has exactly the room that the documents need.
void check_room(const std::vector<Document>& documents, const TokenRow& row);

// Throws std::invalid_argument unless the row has room for the padded documents, and cu_seqlens for
// all of them and for a document of what is left of the row.
void check_padded_room(const std::vector<Document>& documents, const Padding& padding,
                       const TokenRow& row);

// Writes the row in one pass; the first label of each document becomes kIgnoreIndex. Returns how
// many labels are left that give loss. The room must have been checked.
std::int64_t pack_tokens(const std::vector<Document>& documents, const TokenRow& row) noexcept;

// The same with padding. The room must have been checked.
std::int64_t pack_padded(const std::vector<Document>& documents, const Padding& padding,
                         const TokenRow& row) noexcept;

// Copies the parts end to end; `out` has room for all of them.
void concatenate(const std::vector<Bytes>& parts, std::uint8_t* out) noexcept;

}  // namespace omniload
