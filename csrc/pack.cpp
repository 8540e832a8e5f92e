#include "pack.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "vectors.h"

namespace omniload {
namespace {

std::int64_t offset_at(const ListColumn& column, std::int64_t index) {
  return column.wide ? static_cast<const std::int64_t*>(column.offsets)[index]
                     : static_cast<const std::int32_t*>(column.offsets)[index];
}

struct Span {
  std::int64_t start;
  std::int64_t length;
};

Span list_at(const ListColumn& column, std::int64_t row) {
  if (row < 0 || row >= column.num_lists) {
    throw std::invalid_argument("rows must lie in the column of " +
                                std::to_string(column.num_lists) + " lists, got " +
                                std::to_string(row) + ".");
  }
  const std::int64_t start = offset_at(column, row);
  const std::int64_t end = offset_at(column, row + 1);
  if (start < 0 || end <= start || end > column.num_values) {
    throw std::invalid_argument("a list must lie in the " + std::to_string(column.num_values) +
                                " values and not be empty, got [" + std::to_string(start) + ", " +
                                std::to_string(end) + ") (row " + std::to_string(row) + ").");
  }
  return {start, end - start};
}

// The hot loop: 8 bytes in and 24 bytes out per token, bound by memory.
OMNILOAD_VECTORS std::int64_t widen(const std::int32_t* input_ids, const std::int32_t* labels,
                                    std::int64_t length, std::int64_t* out_ids,
                                    std::int64_t* out_labels, std::int64_t* out_positions) {
  std::int64_t num_loss_tokens = 0;
  for (std::int64_t t = 0; t < length; ++t) {
    out_ids[t] = input_ids[t];
    out_labels[t] = labels[t];
    out_positions[t] = t;
    num_loss_tokens += labels[t] != kIgnoreIndex;
  }
  return num_loss_tokens;
}

std::int64_t padded_length(std::int64_t length, std::int64_t multiple) {
  return (length + multiple - 1) / multiple * multiple;
}

// Writes padding to the tokens from `begin` to `end`, counted from `position` on.
OMNILOAD_VECTORS void write_padding(const TokenRow& row, std::int64_t begin, std::int64_t end,
                                    std::int64_t position, std::int32_t token_id) {
  for (std::int64_t t = begin; t < end; ++t) row.input_ids[t] = token_id;
  for (std::int64_t t = begin; t < end; ++t) row.labels[t] = kIgnoreIndex;
  for (std::int64_t t = begin; t < end; ++t) row.position_ids[t] = position + (t - begin);
}

}  // namespace

std::vector<Document> select(const ListColumn& input_ids, const ListColumn& labels,
                             const std::int64_t* rows, std::size_t num_rows) {
  std::vector<Document> documents;
  documents.reserve(num_rows);
  for (std::size_t i = 0; i < num_rows; ++i) {
    const Span ids = list_at(input_ids, rows[i]);
    const Span given = list_at(labels, rows[i]);
    if (ids.length != given.length) {
      throw std::invalid_argument("labels must be as long as input_ids: expected " +
                                  std::to_string(ids.length) + ", got " +
                                  std::to_string(given.length) + " (row " +
                                  std::to_string(rows[i]) + ").");
    }
    documents.push_back({input_ids.values + ids.start, labels.values + given.start, ids.length});
  }
  return documents;
}

void check_room(const std::vector<Document>& documents, const TokenRow& row) {
  std::int64_t total = 0;
  for (const Document& document : documents) {
    // each length is at most what one buffer holds, so the sum is stopped long before it wraps
    total += document.length;
    if (total > kMaxTokens) {
      throw std::invalid_argument("a row must have at most " + std::to_string(kMaxTokens) +
                                  " tokens.");
    }
  }
  const auto num_samples = static_cast<std::int64_t>(documents.size());
  if (row.num_tokens != total || row.num_samples != num_samples) {
    throw std::invalid_argument("out must be as large as the row: expected " +
                                std::to_string(total) + " tokens of " +
                                std::to_string(num_samples) + " samples, got " +
                                std::to_string(row.num_tokens) + " of " +
                                std::to_string(row.num_samples) + ".");
  }
}

std::int64_t pack_tokens(const std::vector<Document>& documents, const TokenRow& row) noexcept {
  std::int64_t start = 0;
  std::int64_t num_loss_tokens = 0;
  std::int32_t* boundary = row.cu_seqlens;
  *boundary++ = 0;
  for (const Document& document : documents) {
    num_loss_tokens += widen(document.input_ids, document.labels, document.length,
                             row.input_ids + start, row.labels + start, row.position_ids + start);
    num_loss_tokens -= document.labels[0] != kIgnoreIndex;
    row.labels[start] = kIgnoreIndex;
    start += document.length;
    *boundary++ = static_cast<std::int32_t>(start);
  }
  return num_loss_tokens;
}

void check_padded_room(const std::vector<Document>& documents, const Padding& padding,
                       const TokenRow& row) {
  std::int64_t total = 0;
  for (const Document& document : documents) {
    // a multiple is below 2^31, and a length at most what one buffer holds
    total += padded_length(document.length, padding.multiple);
    if (total > row.num_tokens || total > kMaxTokens) break;
  }
  const auto num_samples = static_cast<std::int64_t>(documents.size());
  const std::int64_t need = num_samples + (row.num_tokens > total ? 1 : 0);
  if (total > row.num_tokens || row.num_tokens > kMaxTokens || row.num_samples < need) {
    throw std::invalid_argument("out must have room for the padded row: expected at least " +
                                std::to_string(total) + " tokens of " + std::to_string(need) +
                                " documents, got " + std::to_string(row.num_tokens) + " of " +
                                std::to_string(row.num_samples) + ".");
  }
}

std::int64_t pack_padded(const std::vector<Document>& documents, const Padding& padding,
                         const TokenRow& row) noexcept {
  std::int64_t start = 0;
  std::int64_t num_loss_tokens = 0;
  std::int32_t* boundary = row.cu_seqlens;
  std::int32_t* const last = boundary + row.num_samples;
  *boundary = 0;
  for (const Document& document : documents) {
    num_loss_tokens += widen(document.input_ids, document.labels, document.length,
                             row.input_ids + start, row.labels + start, row.position_ids + start);
    num_loss_tokens -= document.labels[0] != kIgnoreIndex;
    row.labels[start] = kIgnoreIndex;
    const std::int64_t end = start + padded_length(document.length, padding.multiple);
    write_padding(row, start + document.length, end, document.length, padding.token_id);
    start = end;
    *++boundary = static_cast<std::int32_t>(start);
  }
  write_padding(row, start, row.num_tokens, 0, padding.token_id);
  while (boundary != last) *++boundary = static_cast<std::int32_t>(row.num_tokens);
  return num_loss_tokens;
}

void concatenate(const std::vector<Bytes>& parts, std::uint8_t* out) noexcept {
  for (const Bytes& part : parts) {
    if (part.size != 0) {  // an empty buffer may have no address
      std::memcpy(out, part.data, part.size);
      out += part.size;
    }
  }
}

}  // namespace omniload
