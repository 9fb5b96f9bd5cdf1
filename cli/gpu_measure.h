#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "cuda/device.h"
#include "flashoverlap/communicator.h"
#include "flashoverlap/cuda_context.h"
#include "flashoverlap/operators.h"
#include "matrices.h"

/// What runs on GPUs have in common: matrices there and back, and batches of calls that are timed.
namespace flashoverlap::cli {

/// A copy of `matrix` in the memory of `device`.
[[nodiscard]] cuda::DeviceBuffer on_device(int device, const Matrix& matrix);
/// Writes `matrix` over `to`, a copy of it.
void write_to(int device, cuda::DeviceBuffer& to, const Matrix& matrix);
/// Reads `matrix` from its copy, behind all that is in `stream`.
void read_from(const cuda::DeviceBuffer& from, Matrix& matrix, Stream& stream);

[[nodiscard]] cuda::DeviceBuffer on_device(int device, const std::vector<float>& values);
void write_to(int device, cuda::DeviceBuffer& to, const std::vector<float>& values);
void read_from(const cuda::DeviceBuffer& from, std::vector<float>& values, Stream& stream);

/// One rank's operator, in a context of its own for each form of the GEMM that is measured. Collective.
class OperatorForms {
 public:
  using Make = std::function<std::unique_ptr<GemmOperator>(Context&)>;
  /// `decomposed`: GemmForm::kDecomposed, too.
  OperatorForms(const std::shared_ptr<Communicator>& communicator, const CudaOptions& options,
                bool decomposed, const Make& make);

  [[nodiscard]] GemmOperator& persistent() const { return *forms_.front().op; }
  [[nodiscard]] bool has_decomposed() const { return forms_.size() > 1; }
  [[nodiscard]] GemmOperator& decomposed() const { return *forms_.back().op; }

 private:
  struct Form {
    std::unique_ptr<Context> context;
    std::unique_ptr<GemmOperator> op;
  };
  std::vector<Form> forms_;
};

/// Times batches of calls in a stream of the device that is current where it is made.
class BatchTimer {
 public:
  /// Microseconds of one of `calls` calls back to back, the slowest rank's; the same on every rank.
  /// Collective.
  double time_us(Communicator& communicator, Stream& stream, int calls, const std::function<void()>& call);

 private:
  cuda::Event begin_{true};
  cuda::Event end_{true};
};

}  // namespace flashoverlap::cli
