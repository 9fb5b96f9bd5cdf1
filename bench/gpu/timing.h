// Timing on the device: events around a batch of launches, medians of many batches, contenders in turn.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "core/median.h"
#include "cublas_baseline.h"

namespace bench {

using Launch = std::function<void(cudaStream_t)>;

using flashoverlap::core::median;

class Timer {
 public:
  explicit Timer(cudaStream_t stream) : stream_(stream) {
    BENCH_CUDA(cudaEventCreate(&begin_));
    BENCH_CUDA(cudaEventCreate(&end_));
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  ~Timer() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }

  // Mean time of one of `launches` back-to-back launches, in us.
  double batch_us(const Launch& launch, int launches) {
    BENCH_CUDA(cudaEventRecord(begin_, stream_));
    for (int i = 0; i < launches; ++i) launch(stream_);
    BENCH_CUDA(cudaEventRecord(end_, stream_));
    BENCH_CUDA(cudaEventSynchronize(end_));
    float ms = 0;
    BENCH_CUDA(cudaEventElapsedTime(&ms, begin_, end_));
    return ms * 1000.0 / launches;
  }

  // Median time of each contender. Each round times all of them, forwards and then backwards, beginning with
  // another one each time: so a falling clock, the predecessor's cache contents and the place after the pause
  // hit all alike. The pause lets the card cool; the batch that follows it is thrown away.
  std::vector<double> compare_us(const std::vector<Launch>& contenders, int rounds, int pause_ms,
                                 double batch_us_wanted = 2000) {
    const std::size_t n = contenders.size();
    std::vector<std::vector<double>> samples(n);
    std::vector<int> launches(n);
    for (std::size_t i = 0; i < n; ++i) {
      const double once = batch_us(contenders[i], 2);
      launches[i] = std::clamp(static_cast<int>(batch_us_wanted / once), 2, 50);
    }
    for (int round = 0; round < rounds; ++round) {
      const auto turn = [&](std::size_t i) { return (i + static_cast<std::size_t>(round)) % n; };
      (void)batch_us(contenders[turn(n - 1)], launches[turn(n - 1)]);
      for (std::size_t i = 0; i < n; ++i)
        samples[turn(i)].push_back(batch_us(contenders[turn(i)], launches[turn(i)]));
      for (std::size_t i = n; i-- > 0;)
        samples[turn(i)].push_back(batch_us(contenders[turn(i)], launches[turn(i)]));
      std::this_thread::sleep_for(std::chrono::milliseconds(pause_ms));
    }
    std::vector<double> medians;
    for (auto& values : samples) medians.push_back(median(values));
    return medians;
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t begin_{};
  cudaEvent_t end_{};
};

}  // namespace bench
