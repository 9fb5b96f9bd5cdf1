// An epilogue in the GEMM against the same one as a pass over the output behind it, for each sm_90a kernel:
//   epilogue_bench [--k 4096] [--rounds 7]
// 8192 x 7168 x k, bf16, all SMs, gates that are open, output in place; us.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "device_plan.h"
#include "flashoverlap/plan_builders.h"
#include "restore.h"
#include "signal_gemm.h"
#include "test_matrices.h"
#include "timing.h"

namespace {

namespace fo = flashoverlap;
using fo::Epilogue;
using fo::cuda::DeviceBuffer;

constexpr int kM = 8192;
constexpr int kN = 7168;

DeviceBuffer random_elements(std::int64_t count, std::uint64_t seed) {
  DeviceBuffer buffer(0, 2 * count, "a matrix of the benchmark");
  bench::fill_random(bench::Element16::kBf16, buffer.data(), count, seed, nullptr);
  return buffer;
}

struct Matrices {
  explicit Matrices(int depth) : k(depth) { BENCH_CUDA(cudaDeviceSynchronize()); }
  int k;
  DeviceBuffer a = random_elements(std::int64_t{kM} * k, 1);
  DeviceBuffer b = random_elements(std::int64_t{kN} * k, 2);
  DeviceBuffer d = random_elements(std::int64_t{kM} * kN, 3);
  DeviceBuffer bias = random_elements(kN, 4);
  DeviceBuffer residual = random_elements(std::int64_t{kM} * kN, 5);
};

struct Case {
  std::string name;
  bool is_gated = true;
  Epilogue epilogue = {};
  bool is_pass = false;
};

std::vector<Case> cases_of(const Matrices& m) {
  std::vector<Case> cases{{"no gates", false}, {"none"}};
  const auto add = [&](const char* name, const Epilogue& epilogue) {
    cases.push_back({name, true, epilogue, false});
    cases.push_back({std::string(name) + ", pass", true, epilogue, true});
  };
  Epilogue epilogue;
  epilogue.bias = m.bias.data();
  add("bias", epilogue);
  epilogue = {};
  for (const fo::Activation activation :
       {fo::Activation::kRelu, fo::Activation::kSilu, fo::Activation::kGelu}) {
    epilogue.activation = activation;
    add(std::string(fo::name_of(activation)).c_str(), epilogue);
  }
  epilogue = {};
  epilogue.residual = m.residual.data();
  epilogue.residual_ld = kN;
  add("residual", epilogue);
  return cases;
}

void restore(const Matrices& m, const Epilogue& epilogue, cudaStream_t stream) {
  fo::cuda::RestoreParams params;
  params.rows = kM;
  params.n = kN;
  params.source = params.out = m.d.data();
  params.source_ld = params.ldo = kN;
  params.epilogue = epilogue;
  fo::cuda::launch_restore(params, stream);
}

void measure(const fo::cuda::SignalGemmVariant& variant, const Matrices& m, int rounds) {
  int sms = 0;
  BENCH_CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  fo::PlanOptions options;
  options.dtype = fo::DType::kBFloat16;
  options.m = kM;
  options.n = kN;
  options.k = m.k;
  options.tile_m = variant.tile_rows;
  options.tile_n = variant.tile_cols;
  options.swizzle = 8;
  const fo::OverlapPlan plan = fo::plan_all_gather_gemm(options, {});
  const fo::cuda::DevicePlan tables(0, plan, variant);
  const DeviceBuffer needed(0, std::ssize(plan.schedule) * 4, "gates");
  const DeviceBuffer arrivals(0, 64, "arrivals");
  BENCH_CUDA(cudaMemset(needed.data(), 0, static_cast<std::size_t>(needed.bytes())));
  BENCH_CUDA(cudaMemset(arrivals.data(), 0, static_cast<std::size_t>(arrivals.bytes())));
  const std::vector<Case> cases = cases_of(m);
  std::vector<std::unique_ptr<fo::cuda::PreparedGemm>> gemms;
  std::vector<bench::Launch> launches;
  for (const Case& c : cases) {
    fo::cuda::SignalGemmArguments arguments;
    arguments.m = kM;
    arguments.n = kN;
    arguments.k = m.k;
    arguments.a = m.a.data();
    arguments.b = m.b.data();
    arguments.lda = arguments.ldb = m.k;
    arguments.output = m.d.data();
    arguments.ldd = kN;
    arguments.tables = tables.tables();
    arguments.num_sms = sms;
    if (c.is_gated) {
      arguments.gates.needed = static_cast<const std::uint32_t*>(needed.data());
      arguments.gates.arrivals = static_cast<const std::uint32_t*>(arrivals.data());
    }
    if (!c.is_pass) arguments.finish.epilogue = c.epilogue;
    arguments.finish.has_epilogue = !fo::cuda::is_plain(arguments.finish.epilogue);
    gemms.push_back(variant.prepare(arguments));
    launches.push_back([&c, &m, gemm = gemms.back().get()](cudaStream_t stream) {
      gemm->launch(stream);
      if (c.is_pass) restore(m, c.epilogue, stream);
    });
  }
  cudaStream_t stream = nullptr;
  BENCH_CUDA(cudaStreamCreate(&stream));
  const std::vector<double> times = bench::Timer(stream).compare_us(launches, rounds, 5);
  std::printf("%s, k %d:", variant.name, m.k);
  for (std::size_t i = 0; i < cases.size(); ++i) std::printf(" | %s %.0f", cases[i].name.c_str(), times[i]);
  std::printf("\n");
  BENCH_CUDA(cudaStreamDestroy(stream));
}

}  // namespace

int main(int argc, char** argv) {
  int k = 4096;
  int rounds = 7;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--k") == 0) k = std::atoi(argv[i + 1]);
    if (std::strcmp(argv[i], "--rounds") == 0) rounds = std::atoi(argv[i + 1]);
  }
  fo::cuda::load_restore_kernels();
  const Matrices matrices(k);
  for (const fo::cuda::SignalGemmVariant* variant : fo::cuda::signal_gemm_variants()) {
    if (variant->type == fo::cuda::GemmType::kBf16 && variant->exact_capability)
      measure(*variant, matrices, rounds);
  }
  return 0;
}
