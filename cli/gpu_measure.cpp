#include "gpu_measure.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>

#include "cuda/check.h"
#include "flashoverlap/cuda_context.h"

namespace flashoverlap::cli {
namespace {

std::size_t bytes_of(const Matrix& matrix) {
  return static_cast<std::size_t>(matrix.rows() * matrix.cols() * size_of(matrix.dtype()));
}

cudaStream_t native(Stream& stream) {
  return static_cast<cudaStream_t>(native_handle(stream));
}

std::size_t bytes_of(const std::vector<float>& values) {
  return values.size() * sizeof(float);
}

template <class Values>
cuda::DeviceBuffer copy_of(int device, const Values& values) {
  cuda::DeviceBuffer buffer(device, static_cast<std::int64_t>(bytes_of(values)),
                            "a matrix of flashoverlap run");
  write_to(device, buffer, values);
  return buffer;
}

void read_bytes(const cuda::DeviceBuffer& from, void* to, std::size_t bytes, Stream& stream) {
  stream.synchronize();
  if (bytes == 0) return;
  FLASHOVERLAP_CUDA_CHECK(cudaMemcpyAsync(to, from.data(), bytes, cudaMemcpyDeviceToHost, native(stream)));
  stream.synchronize();
}

}  // namespace

cuda::DeviceBuffer on_device(int device, const Matrix& matrix) {
  return copy_of(device, matrix);
}

void write_to(int device, cuda::DeviceBuffer& to, const Matrix& matrix) {
  cuda::upload(device, to.data(), matrix.data(), bytes_of(matrix));
}

void read_from(const cuda::DeviceBuffer& from, Matrix& matrix, Stream& stream) {
  read_bytes(from, matrix.data(), bytes_of(matrix), stream);
}

cuda::DeviceBuffer on_device(int device, const std::vector<float>& values) {
  return copy_of(device, values);
}

void write_to(int device, cuda::DeviceBuffer& to, const std::vector<float>& values) {
  cuda::upload(device, to.data(), values.data(), bytes_of(values));
}

void read_from(const cuda::DeviceBuffer& from, std::vector<float>& values, Stream& stream) {
  read_bytes(from, values.data(), bytes_of(values), stream);
}

OperatorForms::OperatorForms(const std::shared_ptr<Communicator>& communicator, const CudaOptions& options,
                             bool decomposed, const Make& make) {
  std::vector<GemmForm> wanted{GemmForm::kPersistent};
  if (decomposed) wanted.push_back(GemmForm::kDecomposed);
  for (const GemmForm form : wanted) {
    CudaOptions own = options;
    own.form = form;
    auto context = std::make_unique<Context>(communicator, make_cuda_executor(communicator, own));
    auto op = make(*context);
    forms_.push_back({std::move(context), std::move(op)});
  }
}

double BatchTimer::time_us(Communicator& communicator, Stream& stream, int calls,
                           const std::function<void()>& call) {
  (void)communicator.exchange(std::uint64_t{0}, {.operation = "start of a measured batch"});
  begin_.record(native(stream));
  for (int i = 0; i < calls; ++i) call();
  end_.record(native(stream));
  stream.synchronize();
  float ms = 0;
  FLASHOVERLAP_CUDA_CHECK(cudaEventElapsedTime(&ms, begin_.get(), end_.get()));
  const double us = static_cast<double>(ms) * 1e3 / calls;
  double slowest = 0;
  for (const std::uint64_t bits :
       communicator.exchange(std::bit_cast<std::uint64_t>(us), {.operation = "end of a measured batch"})) {
    slowest = std::max(slowest, std::bit_cast<double>(bits));
  }
  return slowest;
}

}  // namespace flashoverlap::cli
