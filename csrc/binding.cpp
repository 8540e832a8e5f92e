// The module omniload._C: the only file here that knows Python.
//
// CPython's limited API and the buffer protocol, so that one build serves every Python from 3.11 on
// and any torch or NumPy. All arguments are checked before memory is touched; the interpreter lock
// is released around the work.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "masks.h"
#include "mrope.h"
#include "pack.h"
#include "resize.h"
#include "tiles.h"

namespace {

// Thrown where a Python exception is already set.
struct PythonError {};

class ReleasedLock {
 public:
  ReleasedLock() : state_(PyEval_SaveThread()) {}
  ~ReleasedLock() { PyEval_RestoreThread(state_); }
  ReleasedLock(const ReleasedLock&) = delete;
  ReleasedLock& operator=(const ReleasedLock&) = delete;

 private:
  PyThreadState* state_;
};

class Reference {
 public:
  explicit Reference(PyObject* object) : object_(object) {
    if (object_ == nullptr) throw PythonError{};
  }
  ~Reference() { Py_DecRef(object_); }
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;
  PyObject* get() const { return object_; }

 private:
  PyObject* object_;
};

enum class Access { kRead, kWrite };

// Holds the memory of a Python object; releases it when it goes. Not movable: some exporters let
// the view point into itself.
class Buffer {
 public:
  Buffer() = default;
  Buffer(PyObject* object, const char* name, Access access = Access::kRead) {
    acquire(object, name, access);
  }
  ~Buffer() {
    if (held_) PyBuffer_Release(&view_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void acquire(PyObject* object, const char* name, Access access = Access::kRead) {
    int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT;
    if (access == Access::kWrite) flags |= PyBUF_WRITABLE;
    if (PyObject_GetBuffer(object, &view_, flags) != 0) throw PythonError{};
    held_ = true;
    name_ = name;
  }

  // The elements, once their type and place are known to be right.
  template <typename T>
  T* as() const {
    if (reinterpret_cast<std::uintptr_t>(view_.buf) % alignof(T) != 0) {
      throw std::invalid_argument(std::string(name_) + " must be aligned to " +
                                  std::to_string(alignof(T)) + " bytes.");
    }
    // one native letter; NumPy writes int64 as 'l' or 'q', whichever the platform calls it
    const char* format = view_.format == nullptr ? "B" : view_.format;
    const char* letters = sizeof(T) == 1 ? "B" : sizeof(T) == 2 ? "h" : "ilq";
    const bool fits = std::strlen(format) == 1 && std::strchr(letters, format[0]) != nullptr &&
                      view_.itemsize == static_cast<Py_ssize_t>(sizeof(T));
    if (!fits) {
      throw std::invalid_argument(std::string(name_) + " must be " +
                                  (sizeof(T) == 1 ? "uint8" : "int") +
                                  (sizeof(T) == 1 ? "" : std::to_string(8 * sizeof(T))) +
                                  ", got format '" + format + "' of " +
                                  std::to_string(view_.itemsize) + " bytes.");
    }
    return static_cast<T*>(view_.buf);
  }

  std::int64_t size() const { return view_.itemsize == 0 ? 0 : view_.len / view_.itemsize; }
  Py_ssize_t itemsize() const { return view_.itemsize; }
  int ndim() const { return view_.ndim; }
  std::int64_t extent(int axis) const { return view_.shape[axis]; }

 private:
  Py_buffer view_{};
  bool held_ = false;
  const char* name_ = "";
};

// The buffers of a sequence of objects; a vector that never moves its elements.
class Buffers {
 public:
  Buffers(PyObject* sequence, const char* name) : buffers_(length(sequence)) {
    for (std::size_t i = 0; i < buffers_.size(); ++i) {
      // the sequence may be any Python object: it owns its items only as long as it likes
      const Reference item(PySequence_GetItem(sequence, static_cast<Py_ssize_t>(i)));
      buffers_[i].acquire(item.get(), name);
    }
  }
  std::size_t size() const { return buffers_.size(); }
  const Buffer& operator[](std::size_t i) const { return buffers_[i]; }

 private:
  static std::size_t length(PyObject* sequence) {
    const Py_ssize_t size = PySequence_Size(sequence);
    if (size < 0) throw PythonError{};
    return static_cast<std::size_t>(size);
  }
  std::vector<Buffer> buffers_;
};

void check_count(Py_ssize_t got, Py_ssize_t want, const char* function) {
  if (got != want) {
    PyErr_Format(PyExc_TypeError, "%s() takes %zd arguments, got %zd", function, want, got);
    throw PythonError{};
  }
}

// A count of tokens, blocks or places that fits into int32.
std::int64_t count_of(PyObject* number, const char* name, std::int64_t least) {
  const long long value = PyLong_AsLongLong(number);
  if (value == -1 && PyErr_Occurred() != nullptr) throw PythonError{};
  if (value < least || value > INT32_MAX) {
    throw std::invalid_argument(std::string(name) + " must be from " + std::to_string(least) +
                                " to " + std::to_string(INT32_MAX) + ", got " +
                                std::to_string(value) + ".");
  }
  return value;
}

struct RowBuffers {
  Buffer input_ids, labels, position_ids, cu_seqlens;

  explicit RowBuffers(PyObject* const* arguments) {
    input_ids.acquire(arguments[0], "out_input_ids", Access::kWrite);
    labels.acquire(arguments[1], "out_labels", Access::kWrite);
    position_ids.acquire(arguments[2], "out_position_ids", Access::kWrite);
    cu_seqlens.acquire(arguments[3], "out_cu_seqlens", Access::kWrite);
  }

  omniload::TokenRow row() const {
    const std::int64_t num_tokens = input_ids.size();
    if (labels.size() != num_tokens || position_ids.size() != num_tokens) {
      throw std::invalid_argument("out_labels and out_position_ids must be as long as "
                                  "out_input_ids.");
    }
    if (cu_seqlens.size() < 1) throw std::invalid_argument("out_cu_seqlens must not be empty.");
    return {input_ids.as<std::int64_t>(),  labels.as<std::int64_t>(),
            position_ids.as<std::int64_t>(), cu_seqlens.as<std::int32_t>(),
            num_tokens,                    cu_seqlens.size() - 1};
  }
};

std::vector<omniload::Document> documents_of(const Buffers& input_ids, const Buffers& labels) {
  if (input_ids.size() != labels.size()) {
    throw std::invalid_argument("labels must be one array for each of input_ids: expected " +
                                std::to_string(input_ids.size()) + ", got " +
                                std::to_string(labels.size()) + ".");
  }
  std::vector<omniload::Document> documents;
  documents.reserve(input_ids.size());
  for (std::size_t i = 0; i < input_ids.size(); ++i) {
    const std::int64_t length = input_ids[i].size();
    if (labels[i].size() != length || length == 0) {
      throw std::invalid_argument(
          "labels must be as long as input_ids, and neither empty: got " +
          std::to_string(labels[i].size()) + " for " + std::to_string(length) + " (sample " +
          std::to_string(i) + ").");
    }
    documents.push_back(
        {input_ids[i].as<const std::int32_t>(), labels[i].as<const std::int32_t>(), length});
  }
  return documents;
}

PyObject* pack(PyObject* const* arguments, Py_ssize_t count) {
  const bool is_padded = count == 10;
  if (!is_padded) check_count(count, 8, "pack");
  const Buffers input_ids(arguments[0], "input_ids");
  const Buffers labels(arguments[1], "labels");
  const Buffers tiles(arguments[2], "tiles");
  const RowBuffers out(arguments + 3);
  const Buffer out_tiles(arguments[7], "out_tiles", Access::kWrite);

  const std::vector<omniload::Document> documents = documents_of(input_ids, labels);
  const omniload::TokenRow row = out.row();
  omniload::Padding padding{1, 0};
  if (is_padded) {
    padding.multiple = count_of(arguments[8], "document_multiple", 1);
    padding.token_id = static_cast<std::int32_t>(count_of(arguments[9], "token_id", 0));
    omniload::check_padded_room(documents, padding, row);
  } else {
    omniload::check_room(documents, row);
  }
  std::vector<omniload::Bytes> parts;
  parts.reserve(tiles.size());
  std::int64_t num_bytes = 0;
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    parts.push_back({tiles[i].as<const std::uint8_t>(), static_cast<std::size_t>(tiles[i].size())});
    num_bytes += tiles[i].size();
  }
  std::uint8_t* tile_bytes = out_tiles.as<std::uint8_t>();
  if (out_tiles.size() != num_bytes) {
    throw std::invalid_argument("out_tiles must have the bytes of all tiles: expected " +
                                std::to_string(num_bytes) + ", got " +
                                std::to_string(out_tiles.size()) + ".");
  }
  std::int64_t num_loss_tokens;
  {
    const ReleasedLock released;
    num_loss_tokens = is_padded ? omniload::pack_padded(documents, padding, row)
                                : omniload::pack_tokens(documents, row);
    omniload::concatenate(parts, tile_bytes);
  }
  return PyLong_FromLongLong(num_loss_tokens);
}

omniload::ListColumn list_column(const Buffer& values, const Buffer& offsets) {
  if (offsets.size() < 1) throw std::invalid_argument("offsets must not be empty.");
  const bool wide = offsets.itemsize() == 8;
  const void* data = wide ? static_cast<const void*>(offsets.as<const std::int64_t>())
                          : static_cast<const void*>(offsets.as<const std::int32_t>());
  return {values.as<const std::int32_t>(), values.size(), data, offsets.size() - 1, wide};
}

PyObject* pack_list(PyObject* const* arguments, Py_ssize_t count) {
  check_count(count, 9, "pack_list");
  const Buffer values(arguments[0], "values");
  const Buffer offsets(arguments[1], "offsets");
  const Buffer label_values(arguments[2], "label_values");
  const Buffer label_offsets(arguments[3], "label_offsets");
  const Buffer rows(arguments[4], "rows");
  const RowBuffers out(arguments + 5);

  const omniload::ListColumn input_ids = list_column(values, offsets);
  const omniload::ListColumn labels = list_column(label_values, label_offsets);
  const omniload::TokenRow row = out.row();
  const std::vector<omniload::Document> documents = omniload::select(
      input_ids, labels, rows.as<const std::int64_t>(), static_cast<std::size_t>(rows.size()));
  omniload::check_room(documents, row);
  std::int64_t num_loss_tokens;
  {
    const ReleasedLock released;
    num_loss_tokens = omniload::pack_tokens(documents, row);
  }
  return PyLong_FromLongLong(num_loss_tokens);
}

std::int64_t positive(PyObject* number, const char* name) {
  const long long value = PyLong_AsLongLong(number);
  if (value == -1 && PyErr_Occurred() != nullptr) throw PythonError{};
  if (value < 1) {
    throw std::invalid_argument(std::string(name) + " must be at least 1, got " +
                                std::to_string(value) + ".");
  }
  return value;
}

PyObject* image_to_tiles(PyObject* const* arguments, Py_ssize_t count) {
  check_count(count, 4, "image_to_tiles");
  const Buffer image(arguments[0], "image");
  const std::int64_t columns = positive(arguments[1], "columns");
  const std::int64_t rows = positive(arguments[2], "rows");
  const Buffer out(arguments[3], "out", Access::kWrite);
  const auto* pixels = image.as<const std::uint8_t>();
  auto* tiles = out.as<std::uint8_t>();
  if (image.ndim() != 3 || image.extent(2) != 3) {
    throw std::invalid_argument("image must have the shape (height, width, 3).");
  }
  if (image.extent(0) % rows != 0 || image.extent(1) % columns != 0) {
    throw std::invalid_argument("an image of height " + std::to_string(image.extent(0)) +
                                " and width " + std::to_string(image.extent(1)) +
                                " must divide into " + std::to_string(columns) + " columns and " +
                                std::to_string(rows) + " rows.");
  }
  const std::int64_t height = image.extent(0) / rows;
  const std::int64_t width = image.extent(1) / columns;
  // rows * columns can't overflow where the image holds pixels; where it does not, height or width
  // is 0 and the product is compared in parts
  const bool fits = out.ndim() == 4 && out.extent(0) / columns == rows &&
                    out.extent(0) % columns == 0 && out.extent(1) == 3 &&
                    out.extent(2) == height && out.extent(3) == width;
  if (!fits) {
    throw std::invalid_argument("out must have the shape (columns * rows, 3, " +
                                std::to_string(height) + ", " + std::to_string(width) + ").");
  }
  {
    const ReleasedLock released;
    omniload::image_to_tiles(pixels, columns, rows, height, width, tiles);
  }
  Py_RETURN_NONE;
}

PyObject* resize(PyObject* const* arguments, Py_ssize_t count) {
  check_count(count, 5, "resize");
  const Buffer image(arguments[0], "image");
  const std::int64_t columns = positive(arguments[1], "columns");
  const std::int64_t rows = positive(arguments[2], "rows");
  const Buffer out(arguments[3], "out", Access::kWrite);
  const int use_vectors = PyObject_IsTrue(arguments[4]);
  if (use_vectors < 0) throw PythonError{};
  const auto* pixels = image.as<const std::uint8_t>();
  auto* target = out.as<std::uint8_t>();
  if (image.ndim() != 3 || image.extent(2) != 3 || image.size() == 0) {
    throw std::invalid_argument("image must have the shape (height, width, 3), with pixels.");
  }
  const bool planar = out.ndim() == 4;
  const bool fits =
      out.size() > 0 && (planar ? out.extent(0) / columns == rows && out.extent(0) % columns == 0 &&
                                      out.extent(1) == 3
                                : out.ndim() == 3 && columns == 1 && rows == 1 && out.extent(2) == 3);
  if (!fits) {
    throw std::invalid_argument(
        "out must have the shape (columns * rows, 3, height, width), or (height, width, 3) for one "
        "column and row, with pixels.");
  }
  const std::int64_t height = out.extent(planar ? 2 : 0);
  const std::int64_t width = out.extent(planar ? 3 : 1);
  {
    const ReleasedLock released;
    omniload::resize(pixels, image.extent(0), image.extent(1), columns, rows, height, width, planar,
                     use_vectors != 0, target);
  }
  Py_RETURN_NONE;
}

PyObject* resize_is_quick(PyObject* const*, Py_ssize_t count) {
  check_count(count, 0, "resize_is_quick");
  return PyBool_FromLong(omniload::resize_is_quick() ? 1 : 0);
}

PyObject* turn_upright(PyObject* const* arguments, Py_ssize_t count) {
  check_count(count, 3, "turn_upright");
  const Buffer image(arguments[0], "image");
  const std::int64_t orientation = positive(arguments[1], "orientation");
  const Buffer out(arguments[2], "out", Access::kWrite);
  const auto* pixels = image.as<const std::uint8_t>();
  auto* turned = out.as<std::uint8_t>();
  if (image.ndim() != 3 || image.extent(2) != 3) {
    throw std::invalid_argument("image must have the shape (height, width, 3).");
  }
  if (orientation > 8) {
    throw std::invalid_argument("orientation must be 1 to 8, got " + std::to_string(orientation) +
                                ".");
  }
  const std::int64_t height = image.extent(orientation < 5 ? 0 : 1);
  const std::int64_t width = image.extent(orientation < 5 ? 1 : 0);
  if (out.ndim() != 3 || out.extent(0) != height || out.extent(1) != width || out.extent(2) != 3) {
    throw std::invalid_argument("out must have the shape (" + std::to_string(height) + ", " +
                                std::to_string(width) + ", 3).");
  }
  {
    const ReleasedLock released;
    omniload::turn_upright(pixels, image.extent(0), image.extent(1), static_cast<int>(orientation),
                           turned);
  }
  Py_RETURN_NONE;
}

template <typename T>
void normalize_as(const std::uint8_t* pixels, std::int64_t num_tiles, std::int64_t plane,
                  const Buffer& table, const Buffer& out) {
  const T* values = table.as<const T>();
  T* target = out.as<T>();
  const ReleasedLock released;
  omniload::normalize(pixels, num_tiles, plane, values, target);
}

PyObject* normalize(PyObject* const* arguments, Py_ssize_t count) {
  check_count(count, 3, "normalize");
  const Buffer tiles(arguments[0], "tiles");
  const Buffer table(arguments[1], "table");
  const Buffer out(arguments[2], "out", Access::kWrite);
  const auto* pixels = tiles.as<const std::uint8_t>();
  if (tiles.ndim() < 2 || tiles.extent(1) != 3) {
    throw std::invalid_argument("tiles must have the shape (num_tiles, 3, ...).");
  }
  if (table.size() != 3 * 256 || out.size() != tiles.size()) {
    throw std::invalid_argument("table must have 768 values and out as many as tiles, " +
                                std::to_string(tiles.size()) + ": got " +
                                std::to_string(table.size()) + " and " +
                                std::to_string(out.size()) + ".");
  }
  const std::int64_t num_tiles = tiles.extent(0);
  const std::int64_t plane = num_tiles == 0 ? 0 : tiles.size() / num_tiles / 3;
  switch (table.itemsize()) {
    case 2: normalize_as<std::int16_t>(pixels, num_tiles, plane, table, out); break;
    case 8: normalize_as<std::int64_t>(pixels, num_tiles, plane, table, out); break;
    default: normalize_as<std::int32_t>(pixels, num_tiles, plane, table, out);
  }
  Py_RETURN_NONE;
}

PyObject* mrope_position_ids(PyObject* const* arguments, Py_ssize_t count) {
  check_count(count, 5, "mrope_position_ids");
  const Buffer starts(arguments[0], "cu_seqlens");
  const Buffer spans(arguments[1], "image_spans");
  const Buffer grids(arguments[2], "image_grid_thw");
  const std::int64_t merge = positive(arguments[3], "merge");
  const Buffer out(arguments[4], "out", Access::kWrite);
  const std::int64_t num_images = spans.size() / 2;
  if (starts.size() < 1) throw std::invalid_argument("cu_seqlens must not be empty.");
  if (spans.size() != 2 * num_images || grids.size() != 3 * num_images) {
    throw std::invalid_argument(
        "image_grid_thw must have one grid of 3 for each span of 2: got " +
        std::to_string(grids.size()) + " and " + std::to_string(spans.size()) + " numbers.");
  }
  if (out.size() % 3 != 0) throw std::invalid_argument("out must have 3 rows.");
  const std::int64_t num_tokens = out.size() / 3;
  const omniload::ImageRow row{starts.as<const std::int32_t>(), starts.size() - 1,
                               spans.as<const std::int32_t>(),  grids.as<const std::int64_t>(),
                               num_images,                      merge};
  omniload::check_image_row(row, num_tokens);
  auto* positions = out.as<std::int64_t>();
  {
    const ReleasedLock released;
    omniload::mrope_position_ids(row, num_tokens, positions);
  }
  Py_RETURN_NONE;
}

// Fits the width that was given to lists of which the longest are known.
omniload::ListWidths widths_of(std::int64_t given, const omniload::ListWidths& need,
                               const char* name) {
  if (given == 0) return need;
  if (given < need.partial || given < need.full) {
    throw std::invalid_argument(std::string(name) + " must be at least " +
                                std::to_string(std::max(need.partial, need.full)) + ", got " +
                                std::to_string(given) + ".");
  }
  return {given, given};
}

// New memory for int32 numbers, without values.
PyObject* new_values(std::int64_t count) {
  return PyByteArray_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(count * 4));
}

std::int32_t* values_of(const Reference& memory) {
  return reinterpret_cast<std::int32_t*>(PyByteArray_AsString(memory.get()));
}

PyObject* block_mask(PyObject* const* arguments, Py_ssize_t count) {
  check_count(count, 9, "block_mask");
  const Buffer starts(arguments[0], "cu_seqlens");
  Buffer spans;
  const bool has_spans = arguments[1] != Py_None;
  if (has_spans) spans.acquire(arguments[1], "image_spans");
  const std::int64_t kind = count_of(arguments[2], "kind", 0);
  const std::int64_t window = count_of(arguments[3], "window", 0);
  const std::int64_t num_tokens = count_of(arguments[4], "num_tokens", 1);
  const std::int64_t q_block = count_of(arguments[5], "q_block", 1);
  const std::int64_t kv_block = count_of(arguments[6], "kv_block", 1);
  const std::int64_t row_width = count_of(arguments[7], "row_width", 0);
  const std::int64_t column_width = count_of(arguments[8], "column_width", 0);
  if (kind > 2 || has_spans != (kind == 2)) {
    throw std::invalid_argument("kind must be 0, 1 or 2, and image_spans be given for 2 only.");
  }
  if (starts.size() < 1) throw std::invalid_argument("cu_seqlens must not be empty.");
  if (spans.size() % 2 != 0) throw std::invalid_argument("image_spans must be pairs.");
  const omniload::MaskRow row{starts.as<const std::int32_t>(),
                              starts.size() - 1,
                              has_spans ? spans.as<const std::int32_t>() : nullptr,
                              spans.size() / 2,
                              num_tokens,
                              static_cast<omniload::MaskKind>(kind),
                              window};
  omniload::check_mask_row(row);

  const Reference bounds(new_values(2 * num_tokens));
  std::int32_t* lo = values_of(bounds);
  std::vector<omniload::BlockRange> rows(
      static_cast<std::size_t>((num_tokens + q_block - 1) / q_block));
  std::vector<omniload::BlockEdges> edges(rows.size());
  std::vector<omniload::BlockRange> columns(
      static_cast<std::size_t>((num_tokens + kv_block - 1) / kv_block));
  omniload::ListWidths row_need, column_need;
  {
    const ReleasedLock released;
    omniload::write_intervals(row, q_block, lo, lo + num_tokens, edges);
    omniload::find_blocks(edges, num_tokens, q_block, kv_block, rows, columns);
    row_need = omniload::longest(rows);
    column_need = omniload::longest(columns);
  }
  const omniload::ListWidths in_row = widths_of(row_width, row_need, "row_width");
  const omniload::ListWidths in_column = widths_of(column_width, column_need, "column_width");
  const std::int64_t num_values =
      omniload::num_list_values(static_cast<std::int64_t>(rows.size()), in_row) +
      omniload::num_list_values(static_cast<std::int64_t>(columns.size()), in_column);
  const Reference lists(new_values(num_values));
  std::int32_t* out = values_of(lists);
  {
    const ReleasedLock released;
    out = omniload::write_lists(rows, row_need, in_row, out);
    omniload::write_lists(columns, column_need, in_column, out);
  }
  return Py_BuildValue("(OOLLLL)", bounds.get(), lists.get(), static_cast<long long>(in_row.partial),
                       static_cast<long long>(in_row.full),
                       static_cast<long long>(in_column.partial),
                       static_cast<long long>(in_column.full));
}

// Turns C++ exceptions into Python's at the border.
template <PyObject* (*function)(PyObject* const*, Py_ssize_t)>
PyObject* guarded(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  try {
    return function(arguments, count);
  } catch (const PythonError&) {
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

template <PyObject* (*function)(PyObject* const*, Py_ssize_t)>
PyCFunction method() {
  // METH_FASTCALL functions are stored as PyCFunction; through void(*)() compilers don't object
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(guarded<function>));
}

PyMethodDef kMethods[] = {
    {"pack", method<pack>(), METH_FASTCALL, "Pack documents given as buffers; return the loss tokens."},
    {"pack_list", method<pack_list>(), METH_FASTCALL, "Pack rows of two Arrow list columns."},
    {"image_to_tiles", method<image_to_tiles>(), METH_FASTCALL, "Cut an HWC image into CHW tiles."},
    {"resize", method<resize>(), METH_FASTCALL, "Resize an HWC image, to CHW tiles or as it is."},
    {"resize_is_quick", method<resize_is_quick>(), METH_FASTCALL,
     "Whether this processor has the vector code of resize."},
    {"turn_upright", method<turn_upright>(), METH_FASTCALL, "Apply an EXIF orientation."},
    {"normalize", method<normalize>(), METH_FASTCALL, "Look uint8 tiles up in a 3 x 256 table."},
    {"mrope_position_ids", method<mrope_position_ids>(), METH_FASTCALL,
     "Write positions in time, height and width."},
    {"block_mask", method<block_mask>(), METH_FASTCALL,
     "Make intervals and the lists of blocks of a mask."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef_Slot kSlots[] = {{0, nullptr}};

PyModuleDef kModule = {
    PyModuleDef_HEAD_INIT, "_C", "C++ parts of omniload; see _C.pyi.", 0, kMethods, kSlots,
    nullptr,               nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__C() {
  return PyModuleDef_Init(&kModule);
}
