#pragma once

#include <flashoverlap/operators.h>

#include <cstdint>
#include <memory>
#include <vector>

/// Where a layer runs. The layers say what is multiplied with what; a place has the memory for it, and what a
/// rank computes besides the operators' GEMMs.
namespace flashoverlap::layers {

using Values = std::vector<float>;

struct AttentionShape;
class Matrix;

/// Attention of one rank's heads, between two matrices of the place that made it.
class Attention {
 public:
  Attention() = default;
  Attention(const Attention&) = delete;
  Attention& operator=(const Attention&) = delete;
  virtual ~Attention() = default;
  /// For the queries [first, first + count). On CPUs for several threads at a time, with different queries;
  /// on a GPU it is put into the place's stream.
  virtual void run(std::int64_t first, std::int64_t count) = 0;
};

/// One rank's. Memory that was made here may outlive it.
class Place {
 public:
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;
  virtual ~Place() = default;

  [[nodiscard]] Context& context() const { return context_; }
  [[nodiscard]] DType dtype() const { return dtype_; }    ///< Of all matrices.
  [[nodiscard]] void* stream() const { return stream_; }  ///< For Operands::stream.
  [[nodiscard]] int rank() const { return context_.communicator().rank(); }
  [[nodiscard]] int num_ranks() const { return context_.communicator().size(); }

  [[nodiscard]] virtual std::shared_ptr<void> allocate(std::int64_t bytes) = 0;
  /// Host memory to memory of this place, behind all that is in the stream, and back; done on return.
  virtual void write(void* to, const void* from, std::int64_t bytes) = 0;
  virtual void read(const void* from, void* to, std::int64_t bytes) = 0;
  /// Makes every element NaN, behind all that is in the stream.
  virtual void poison(void* to, std::int64_t bytes) = 0;

  /// softmax(q · k^T / sqrt(head_size)) · v of the heads of `own` side by side, over all its tokens, without
  /// a mask. qkv: [tokens, 3 * heads * head_size], q, k and v of each head one after the other; out: [tokens,
  /// heads * head_size], of which the queries' rows are written. Both must stay where they are. Collective,
  /// also for ranks without heads.
  [[nodiscard]] virtual std::unique_ptr<Attention> make_attention(const AttentionShape& own,
                                                                  const Matrix& qkv, const Matrix& out) = 0;

 protected:
  Place(Context& context, DType dtype, void* stream) : context_(context), dtype_(dtype), stream_(stream) {}

 private:
  Context& context_;
  DType dtype_;
  void* stream_;
};

/// Host memory and plain code on the threads of whoever calls; for contexts on CPU threads.
class HostPlace : public Place {
 public:
  explicit HostPlace(Context& context, DType dtype = DType::kFloat32) : Place(context, dtype, nullptr) {}

  [[nodiscard]] std::shared_ptr<void> allocate(std::int64_t bytes) override;
  void write(void* to, const void* from, std::int64_t bytes) override;
  void read(const void* from, void* to, std::int64_t bytes) override;
  void poison(void* to, std::int64_t bytes) override;
  [[nodiscard]] std::unique_ptr<Attention> make_attention(const AttentionShape& own, const Matrix& qkv,
                                                          const Matrix& out) override;
};

/// A dense row-major matrix that lies at a place, which must outlive it.
class Matrix {
 public:
  /// Poisoned.
  Matrix(Place& place, std::int64_t rows, std::int64_t cols);
  /// Values beyond the element type's precision are rounded.
  Matrix(Place& place, std::int64_t rows, std::int64_t cols, const Values& values);
  Matrix(const Matrix&) = delete;
  Matrix& operator=(const Matrix&) = delete;

  [[nodiscard]] void* data() const { return memory_.get(); }
  [[nodiscard]] std::int64_t rows() const { return rows_; }
  [[nodiscard]] std::int64_t cols() const { return cols_; }
  [[nodiscard]] const Place& place() const { return place_; }

  void write(const Values& values) { write_rows(0, values); }
  /// Those from `first` on.
  void write_rows(std::int64_t first, const Values& values) const;
  void poison();
  [[nodiscard]] Values read() const;

 private:
  [[nodiscard]] std::int64_t bytes() const;

  Place& place_;
  std::int64_t rows_;
  std::int64_t cols_;
  std::shared_ptr<void> memory_;
};

}  // namespace flashoverlap::layers
