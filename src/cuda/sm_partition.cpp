#include "sm_partition.h"

#include "check.h"
#include "core/fail.h"
#include "device.h"
#include "driver.h"

namespace flashoverlap::cuda {
namespace {

constexpr unsigned kGreenContextVersion = 12040;

// The driver's functions for green contexts.
struct GreenContextCalls {
  decltype(&cuDeviceGetDevResource) device_resource =
      driver_function<decltype(device_resource)>("cuDeviceGetDevResource", kGreenContextVersion);
  decltype(&cuDevSmResourceSplitByCount) split =
      driver_function<decltype(split)>("cuDevSmResourceSplitByCount", kGreenContextVersion);
  decltype(&cuDevResourceGenerateDesc) describe =
      driver_function<decltype(describe)>("cuDevResourceGenerateDesc", kGreenContextVersion);
  decltype(&cuGreenCtxCreate) create =
      driver_function<decltype(create)>("cuGreenCtxCreate", kGreenContextVersion);
  decltype(&cuGreenCtxDestroy) destroy =
      driver_function<decltype(destroy)>("cuGreenCtxDestroy", kGreenContextVersion);
  decltype(&cuGreenCtxStreamCreate) make_stream =
      driver_function<decltype(make_stream)>("cuGreenCtxStreamCreate", 12050);
  decltype(&cuStreamGetGreenCtx) context_of_stream =
      driver_function<decltype(context_of_stream)>("cuStreamGetGreenCtx", kGreenContextVersion);
};

const GreenContextCalls& calls() {
  static const GreenContextCalls found;
  return found;
}

// All groups of 8 SMs. A remainder cannot be split again and a group cannot be split twice, so the device is
// split once, and partitions are joined from groups.
std::vector<CUdevResource> groups_of(int device) {
  CUdevResource all{};
  check_driver(calls().device_resource(device, &all, CU_DEV_RESOURCE_TYPE_SM), "cuDeviceGetDevResource");
  unsigned count = 0;
  check_driver(calls().split(nullptr, &count, &all, nullptr, 0, kSmGroup), "cuDevSmResourceSplitByCount");
  std::vector<CUdevResource> groups(count);
  CUdevResource left{};
  check_driver(calls().split(groups.data(), &count, &all, &left, 0, kSmGroup), "cuDevSmResourceSplitByCount");
  groups.resize(count);
  return groups;
}

}  // namespace

SmPartition::SmPartition(int device, std::vector<CUdevResource> groups) : device_(device) {
  for (const CUdevResource& group : groups) num_sms_ += static_cast<int>(group.sm.smCount);
  CUdevResourceDesc description{};
  check_driver(calls().describe(&description, groups.data(), static_cast<unsigned>(groups.size())),
               "cuDevResourceGenerateDesc");
  check_driver(calls().create(&context_, description, device, CU_GREEN_CTX_DEFAULT_STREAM),
               "cuGreenCtxCreate");
}

SmPartition::~SmPartition() {
  if (context_ != nullptr) (void)calls().destroy(context_);
}

cudaStream_t SmPartition::make_stream(int priority) const {
  CUstream stream = nullptr;
  check_driver(calls().make_stream(&stream, context_, CU_STREAM_NON_BLOCKING, priority),
               "cuGreenCtxStreamCreate");
  return stream;
}

bool SmPartition::has_stream(cudaStream_t stream) const {
  // The default streams belong to no partition, and the driver refuses to be asked about them.
  if (stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread) return false;
  CUgreenCtx context = nullptr;
  check_driver(calls().context_of_stream(stream, &context), "cuStreamGetGreenCtx");
  return context == context_;
}

int splittable_sms(int device) {
  const DeviceScope scope(device);
  FLASHOVERLAP_CUDA_CHECK(cudaFree(nullptr));
  return static_cast<int>(groups_of(device).size()) * kSmGroup;
}

std::vector<std::shared_ptr<SmPartition>> split_sms(int device, const std::vector<int>& sizes) {
  require_device(device);
  const DeviceScope scope(device);
  FLASHOVERLAP_CUDA_CHECK(
      cudaFree(nullptr));  // the primary context must exist before green contexts are made in it
  std::vector<CUdevResource> groups = groups_of(device);
  int wanted = 0;
  for (const int size : sizes) {
    if (size < kSmGroup || size % kSmGroup != 0) {
      core::fail(ErrorKind::kBadArgument, "an SM partition of {} SMs: must be a multiple of {}, at least {}",
                 size, kSmGroup, kSmGroup);
    }
    wanted += size;
  }
  if (wanted > static_cast<int>(groups.size()) * kSmGroup) {
    core::fail(ErrorKind::kBadArgument,
               "SM partitions of {} SMs in all: device {} has {} SMs, {} of them in groups of {}", wanted,
               device, num_sms(device), groups.size() * kSmGroup, kSmGroup);
  }
  std::vector<std::shared_ptr<SmPartition>> partitions;
  auto next = groups.begin();
  for (const int size : sizes) {
    const auto end = next + size / kSmGroup;
    partitions.push_back(
        std::shared_ptr<SmPartition>(new SmPartition(device, std::vector<CUdevResource>(next, end))));
    next = end;
  }
  return partitions;
}

int num_sms(int device) {
  int count = 0;
  FLASHOVERLAP_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

}  // namespace flashoverlap::cuda
