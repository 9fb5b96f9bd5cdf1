// Collectives between ranks of one host that address each other's memory: kernels and copies read and write
// it.
#include <cmath>
#include <map>
#include <numeric>

#include "check.h"
#include "comm/run_on_all.h"
#include "core/fail.h"
#include "cuda_stream.h"
#include "flashoverlap/cuda_context.h"
#include "local_group.h"
#include "peer_kernels.h"
#include "peer_reader.h"
#include "process_group.h"

namespace flashoverlap {
namespace cuda {
namespace {

std::size_t index(int rank) {
  return static_cast<std::size_t>(rank);
}

std::int64_t sum(std::span<const std::int64_t> counts, int end) {
  return std::accumulate(counts.begin(), counts.begin() + end, std::int64_t{0});
}

const void* at(const void* base, std::int64_t elements, DType dtype) {
  return static_cast<const char*>(base) + elements * size_of(dtype);
}
void* at(void* base, std::int64_t elements, DType dtype) {
  return static_cast<char*>(base) + elements * size_of(dtype);
}

std::vector<std::int64_t> copy_counts(std::span<const std::int64_t> counts, int size, const char* call) {
  if (counts.size() != index(size)) {
    core::fail(ErrorKind::kBadArgument, "{}: {} counts for {} ranks", call, counts.size(), size);
  }
  for (std::size_t r = 0; r < counts.size(); ++r) {
    if (counts[r] < 0)
      core::fail(ErrorKind::kBadArgument, "{}: the count of rank {} is {}, must be >= 0", call, r, counts[r]);
  }
  return {counts.begin(), counts.end()};
}

class PeerCommunicator final : public Communicator, public PeerReader {
 public:
  PeerCommunicator(std::shared_ptr<PeerGroup> group, std::shared_ptr<Communicator> control, int device,
                   LocalGpuOptions options)
      : group_(std::move(group)),
        control_(std::move(control)),
        options_(options),
        rank_(control_->rank()),
        device_(device),
        pace_begin_(device_, 64, "the pacing of a local communicator") {
    const DeviceScope scope(device_);
    load_peer_kernels();
  }

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return group_->size(); }
  [[nodiscard]] std::string_view name() const override { return "local"; }
  [[nodiscard]] bool copies_without_sms() const override {
    const bool is_paced = options_.link.bandwidth_gbps > 0 || options_.link.latency_us > 0;  // by kernels
    return options_.copies == PeerCopy::kCopyEngine && !is_paced;
  }

  [[nodiscard]] bool is_one_process() const override { return !group_->has_processes(); }
  [[nodiscard]] DeviceMemory readable_memory() const override {
    return group_->has_processes() ? DeviceMemory::kShareable : DeviceMemory::kStreamOrdered;
  }

  [[nodiscard]] std::unique_ptr<Stream> make_stream(const std::string& /*name*/) override {
    auto stream = std::make_unique<CudaStream>(device_, CudaStream::Priority::kHigh);
    stream->set_error_poll([group = group_] { group->throw_if_failed(); });
    return stream;
  }

  void all_reduce(const void* send, void* receive, std::int64_t count, DType dtype, Stream& stream,
                  const TransferLabel& label) override {
    if (count < 0) core::fail(ErrorKind::kBadArgument, "all_reduce: count is {}, must be >= 0", count);
    const std::int64_t begin = stretch_begin(count, rank_, dtype);
    if (options_.copies == PeerCopy::kCopyEngine) {
      std::vector<std::int64_t> counts;
      for (int r = 0; r < size(); ++r)
        counts.push_back(stretch_begin(count, r + 1, dtype) - stretch_begin(count, r, dtype));
      scatter_sums("all-reduce", send, at(receive, begin, dtype), counts, dtype, stream, label);
      return gather("all-reduce", at(receive, begin, dtype), receive, counts, dtype, stream, label);
    }
    PeerCall call{"all-reduce", send, receive, {count}, {}, dtype, label};
    const auto bytes = static_cast<double>(count * size_of(dtype));
    run_paced(std::move(call), stream, 2.0 * bytes * (size() - 1) / size(),
              [&](const std::vector<PeerCall>& calls, cudaStream_t on) {
                // Rank r sums stretch r of everybody's input and writes it into everybody's output: each byte
                // is read and written once.
                PeerReduceParams params{.num_from = size(),
                                        .num_to = size(),
                                        .count = stretch_begin(count, rank_ + 1, dtype) - begin};
                for (int r = 0; r < size(); ++r) {
                  params.from[r] = at(calls[index(r)].send, begin, dtype);
                  params.to[r] = at(calls[index(r)].receive, begin, dtype);
                }
                launch_peer_reduce(params, dtype, options_.max_ctas, on);
              });
  }

  void reduce_scatter(const void* send, void* receive, std::span<const std::int64_t> counts, DType dtype,
                      Stream& stream, const TransferLabel& label) override {
    scatter_sums("reduce-scatter", send, receive, copy_counts(counts, size(), "reduce_scatter"), dtype,
                 stream, label);
  }

  void all_gather(const void* send, void* receive, std::span<const std::int64_t> counts, DType dtype,
                  Stream& stream, const TransferLabel& label) override {
    gather("all-gather", send, receive, copy_counts(counts, size(), "all_gather"), dtype, stream, label);
  }

  void all_to_all(const void* send, std::span<const std::int64_t> send_counts, void* receive,
                  std::span<const std::int64_t> receive_counts, DType dtype, Stream& stream,
                  const TransferLabel& label) override {
    PeerCall call{"all-to-all",
                  send,
                  nullptr,
                  copy_counts(send_counts, size(), "all_to_all (send)"),
                  copy_counts(receive_counts, size(), "all_to_all (receive)"),
                  dtype,
                  label};
    const std::int64_t sent = sum(send_counts, size()) - send_counts[index(rank_)];
    const std::int64_t received = sum(receive_counts, size()) - receive_counts[index(rank_)];
    const auto bytes = static_cast<double>(std::max(sent, received) * size_of(dtype));
    run_paced(std::move(call), stream, bytes, [&](const std::vector<PeerCall>& calls, cudaStream_t on) {
      PeerCopyParams params{};
      for (int i = 0; i < size(); ++i) {
        const int r = peer_at(i);
        add_copy(params, at(calls[index(r)].send, sum(calls[index(r)].send_counts, rank_), dtype),
                 at(receive, sum(receive_counts, r), dtype), receive_counts[index(r)]);
      }
      copy(params, dtype, on);
    });
  }

  void introduce(const void* memory, const TransferLabel& label) override {
    if (!group_->has_processes()) return;  // threads have it
    const DeviceScope scope(device_);
    (void)group_->meet({"introduction of memory", memory, nullptr, {1}, {}, DType::kFloat32, label});
    group_->meet_again();
  }

  std::vector<PeerMemory> share_memory(const PeerMemory& memory, const TransferLabel& label) override {
    const DeviceScope scope(device_);
    std::vector<PeerMemory> all;
    for (const PeerCall& call :
         group_->meet({"sharing of memory", memory.first, memory.second, {1}, {}, DType::kFloat32, label}))
      all.push_back({const_cast<void*>(call.send), call.receive});
    group_->meet_again();
    return all;
  }

  [[nodiscard]] LinkModel link() const override { return options_.link; }

  void read_peers(const void* send, std::int64_t size, std::int64_t begin, std::int64_t count,
                  std::span<void* const> to, DType dtype, Stream& stream,
                  const TransferLabel& label) override {
    const auto bytes = static_cast<double>(count * size_of(dtype));
    run_paced({"reading of partial sums", send, nullptr, {size}, {}, dtype, label}, stream,
              bytes * (this->size() - 1), [&](const std::vector<PeerCall>& calls, cudaStream_t on) {
                PeerCopyParams params{};
                for (int i = 1; i < this->size(); ++i) {
                  const int r = peer_at(i);
                  add_copy(params, at(calls[index(r)].send, begin, dtype), to[index(r)], count);
                }
                copy(params, dtype, on);
              });
  }

  void exchange_messages(std::span<const PeerMessage> sends, std::span<const PeerMessage> receives,
                         DType dtype, Stream& stream, const TransferLabel& label,
                         const MessageHooks& hooks) override {
    PeerCall call{"exchange of messages", nullptr, nullptr, {}, {}, dtype, label};
    call.sends.assign(sends.begin(), sends.end());
    call.receives.assign(receives.begin(), receives.end());
    run(std::move(call), stream, [&](const std::vector<PeerCall>& calls, cudaStream_t on) {
      std::vector<std::size_t> next(index(size()), 0);  // among the sends of each rank
      for (std::size_t i = 0; i < receives.size(); ++i) {
        const std::vector<PeerMessage>& theirs = calls[index(receives[i].peer)].sends;
        std::size_t& at = next[index(receives[i].peer)];
        while (theirs[at].peer != rank_) ++at;  // it is there: the counts of all messages match
        const PeerMessage& message = theirs[at++];
        if (message.ready != nullptr) message.ready->wait_on(on);
        hooks.begins(i);
        PeerCopyParams params{};
        add_copy(params, message.data, receives[i].data, receives[i].count);
        // The link goes on with a message that has been waiting for it; what happens on the device between
        // two takes it no time.
        const PaceFrom from = i > 0 && message.ready == nullptr ? PaceFrom::kLastEnd : PaceFrom::kNow;
        pace(static_cast<double>(receives[i].count * size_of(dtype)), on, from,
             [&] { copy(params, dtype, on); });
        hooks.arrived(i);
      }
    });
  }

  void send(const void* /*data*/, std::int64_t /*count*/, DType /*dtype*/, int peer, Stream& /*stream*/,
            const TransferLabel& /*label*/) override {
    no_pairs("send", peer);
  }
  void receive(void* /*data*/, std::int64_t /*count*/, DType /*dtype*/, int peer, Stream& /*stream*/,
               const TransferLabel& /*label*/) override {
    no_pairs("receive", peer);
  }

  void barrier(Stream& stream, const TransferLabel& label) override {
    run_paced({"barrier", nullptr, nullptr, {}, {}, DType::kFloat32, label}, stream, 0,
              [](const auto&, cudaStream_t) {});
  }

  std::vector<std::uint64_t> exchange(std::uint64_t value, const TransferLabel& label) override {
    group_->throw_if_failed();
    return control_->exchange(value, label);
  }
  std::vector<std::string> exchange(const std::string& bytes, const TransferLabel& label) override {
    group_->throw_if_failed();
    return control_->exchange(bytes, label);
  }

  [[nodiscard]] std::shared_ptr<Communicator> subgroup(std::span<const int> ranks) override {
    group_->throw_if_failed();
    const std::shared_ptr<Communicator> control = control_->subgroup(ranks);
    return std::make_shared<PeerCommunicator>(group_->subgroup(*control, ranks), control, device_, options_);
  }

  void abort(const std::string& reason) noexcept override {
    try {
      group_->fail({ErrorKind::kCommunication, fmt::format("rank {} aborted: {}", rank_, reason)});
    } catch (...) {  // out of memory for the text: the abort matters more
      group_->fail({});
    }
    control_->abort(reason);
  }

  void set_timeout(std::chrono::milliseconds timeout) override {
    group_->set_timeout(timeout);
    control_->set_timeout(timeout);
  }
  [[nodiscard]] std::chrono::milliseconds timeout() const override { return group_->timeout(); }

 private:
  void scatter_sums(std::string_view kind, const void* send, void* receive,
                    const std::vector<std::int64_t>& counts, DType dtype, Stream& stream,
                    const TransferLabel& label) {
    const auto bytes = static_cast<double>(sum(counts, size()) * size_of(dtype));
    run_paced({kind, send, nullptr, counts, {}, dtype, label}, stream, bytes * (size() - 1) / size(),
              [&](const std::vector<PeerCall>& calls, cudaStream_t on) {
                PeerReduceParams params{.num_from = size(), .num_to = 1, .count = counts[index(rank_)]};
                const std::int64_t begin = sum(counts, rank_);
                for (int r = 0; r < size(); ++r) params.from[r] = at(calls[index(r)].send, begin, dtype);
                if (options_.copies == PeerCopy::kCopyEngine) fetch_for_sum(params, dtype, on);
                params.to[0] = receive;
                launch_peer_reduce(params, dtype, options_.max_ctas, on);
              });
  }

  /// Copies what other ranks have into this device's memory, and leads the sum there: few SMs read that at
  /// the rate at which the links bring it, but not what lies at their other end.
  void fetch_for_sum(PeerReduceParams& params, DType dtype, cudaStream_t on) {
    if (params.count == 0) return;
    const std::int64_t bytes = (params.count * size_of(dtype) + 255) / 256 * 256;
    auto* const scratch = static_cast<char*>(scratch_for(on, bytes * (size() - 1)));
    PeerCopyParams copies{};
    for (int i = 1; i < size(); ++i) {
      const int r = peer_at(i);
      add_copy(copies, params.from[r], scratch + bytes * (i - 1), params.count);
      params.from[r] = scratch + bytes * (i - 1);
    }
    copy(copies, dtype, on);
  }

  /// Memory that calls in one stream use one after the other. What is too small stays until the end: freeing
  /// would wait for the device.
  void* scratch_for(cudaStream_t stream, std::int64_t bytes) {
    std::vector<DeviceBuffer>& buffers = scratch_[stream];
    if (buffers.empty() || buffers.back().bytes() < bytes) {
      const std::int64_t at_least = buffers.empty() ? 0 : 2 * buffers.back().bytes();
      buffers.emplace_back(device_, std::max(bytes, at_least), "the partial sums of a local communicator");
    }
    return buffers.back().data();
  }

  void gather(std::string_view kind, const void* send, void* receive, const std::vector<std::int64_t>& counts,
              DType dtype, Stream& stream, const TransferLabel& label) {
    const auto bytes = static_cast<double>(sum(counts, size()) * size_of(dtype));
    run_paced({kind, send, nullptr, counts, {}, dtype, label}, stream, bytes * (size() - 1) / size(),
              [&](const std::vector<PeerCall>& calls, cudaStream_t on) {
                PeerCopyParams params{};
                for (int i = 0; i < size(); ++i) {
                  const int r = peer_at(i);
                  void* const to = at(receive, sum(counts, r), dtype);
                  if (calls[index(r)].send != to)
                    add_copy(params, calls[index(r)].send, to, counts[index(r)]);
                }
                copy(params, dtype, on);
              });
  }

  // First element of rank r's stretch of an all-reduce; stretches begin at multiples of 16 bytes.
  [[nodiscard]] std::int64_t stretch_begin(std::int64_t count, int r, DType dtype) const {
    const std::int64_t vector = 16 / size_of(dtype);
    const std::int64_t vectors = (count + vector - 1) / vector;
    return std::min(count, vectors * r / size() * vector);
  }

  // The i-th rank to read from: every rank begins with another one, so that no link carries all at once.
  [[nodiscard]] int peer_at(int i) const { return (rank_ + i) % size(); }

  static void add_copy(PeerCopyParams& params, const void* from, void* to, std::int64_t count) {
    if (count == 0) return;
    params.from[params.num_copies] = from;
    params.to[params.num_copies] = to;
    params.count[params.num_copies++] = count;
  }

  void copy(const PeerCopyParams& params, DType dtype, cudaStream_t on) const {
    if (options_.copies == PeerCopy::kKernel) return launch_peer_copy(params, dtype, options_.max_ctas, on);
    for (int i = 0; i < params.num_copies; ++i) {
      FLASHOVERLAP_CUDA_CHECK(cudaMemcpyAsync(params.to[i], params.from[i],
                                              static_cast<std::size_t>(params.count[i] * size_of(dtype)),
                                              cudaMemcpyDefault, on));
    }
  }

  [[noreturn]] static void no_pairs(const char* call, int peer) {
    core::fail(ErrorKind::kUnsupported,
               "the local GPU communicator has collectives only; {} (peer {}) needs NCCL", call, peer);
  }

  /// Puts `work` into the stream once all ranks are there with `call`, and holds the stream until all are
  /// done.
  template <class Work>
  void run(PeerCall call, Stream& stream, Work&& work) {
    const cudaStream_t on = cuda_stream_of(stream, "local communicator");
    const DeviceScope scope(device_);
    if (is_capturing(on)) {
      core::fail(ErrorKind::kUnsupported,
                 "{}: the local GPU communicator cannot be captured in a CUDA graph; use NCCL", call.kind);
    }
    group_->ready(rank_).record(on);
    const std::vector<PeerCall>& calls = group_->meet(std::move(call));
    for (int r = 0; r < size(); ++r) {
      if (r != rank_) group_->ready(r).wait_on(on);
    }
    work(calls, on);
    group_->done(rank_).record(on);
    group_->meet_again();
    for (int r = 0; r < size(); ++r) {
      if (r != rank_) group_->done(r).wait_on(on);
    }
  }

  template <class Work>
  void run_paced(PeerCall call, Stream& stream, double wire_bytes, Work&& work) {
    run(std::move(call), stream, [&](const std::vector<PeerCall>& calls, cudaStream_t on) {
      pace(wire_bytes, on, PaceFrom::kNow, [&] { work(calls, on); });
    });
  }

  enum class PaceFrom { kNow, kLastEnd };

  /// Puts `work` into the stream such that it is done no sooner than the link would be with `wire_bytes`,
  /// begun now or when the paced work before it in this stream ended.
  template <class Work>
  void pace(double wire_bytes, cudaStream_t on, PaceFrom from, Work&& work) {
    const double wire_us =
        options_.link.bandwidth_gbps > 0 ? wire_bytes / (options_.link.bandwidth_gbps * 1e3) : 0;
    const double paced_us = size() > 1 ? wire_us + options_.link.latency_us : 0;
    auto* const begin = static_cast<std::uint64_t*>(pace_begin_.data());
    if (paced_us > 0 && from == PaceFrom::kNow) launch_pace_begin(begin, on);
    work();
    if (paced_us > 0) launch_pace_end(begin, static_cast<std::uint64_t>(paced_us * 1e3), on);
  }

  std::shared_ptr<PeerGroup> group_;
  std::shared_ptr<Communicator> control_;
  LocalGpuOptions options_;
  int rank_;
  int device_;
  DeviceBuffer pace_begin_;
  std::map<cudaStream_t, std::vector<DeviceBuffer>> scratch_;
};

void check_options(std::size_t num_ranks, const LocalGpuOptions& options) {
  if (num_ranks == 0 || num_ranks > kMaxPeerRanks) {
    core::fail(ErrorKind::kBadArgument, "a local GPU group of {} ranks: must be 1 to {}", num_ranks,
               kMaxPeerRanks);
  }
  if (options.max_ctas < 1)
    core::fail(ErrorKind::kBadArgument, "max_ctas is {}, must be >= 1", options.max_ctas);
  const auto is_bad = [](double value) { return !std::isfinite(value) || value < 0; };
  if (is_bad(options.link.bandwidth_gbps) || is_bad(options.link.latency_us)) {
    core::fail(ErrorKind::kBadArgument, "a link of {} GB/s and {} us: both must be finite and >= 0",
               options.link.bandwidth_gbps, options.link.latency_us);
  }
}

}  // namespace
}  // namespace cuda

std::vector<std::shared_ptr<Communicator>> make_local_gpu_communicators(const std::vector<int>& devices,
                                                                        const LocalGpuOptions& options) {
  cuda::check_options(devices.size(), options);
  for (const int device : devices) cuda::require_device(device);
  const auto group = std::make_shared<cuda::LocalGroup>(devices, options.timeout);
  std::vector<std::shared_ptr<Communicator>> communicators;
  for (const auto& control : make_in_process_communicators(static_cast<int>(devices.size()),
                                                           {.link = {}, .timeout = options.timeout})) {
    const int rank = control->rank();
    communicators.push_back(
        std::make_shared<cuda::PeerCommunicator>(std::make_shared<cuda::LocalMember>(group, rank), control,
                                                 devices[static_cast<std::size_t>(rank)], options));
  }
  return communicators;
}

std::shared_ptr<Communicator> make_local_gpu_communicator(std::shared_ptr<Communicator> control, int device,
                                                          const LocalGpuOptions& options) {
  if (control == nullptr) core::fail(ErrorKind::kBadArgument, "control is null");
  comm::run_on_all(*control, "local GPU communicator", [&] {
    cuda::check_options(static_cast<std::size_t>(control->size()), options);
    cuda::require_device(device);
  });
  auto group = std::make_shared<cuda::ProcessGroup>(*control, device, options.timeout);
  return std::make_shared<cuda::PeerCommunicator>(std::move(group), std::move(control), device, options);
}

}  // namespace flashoverlap
