#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "flashoverlap/communicator.h"

namespace flashoverlap::comm {

enum class CallKind {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kAllToAll,
  kSend,
  kReceive,
  kBarrier,
  kExchangeInteger,
  kExchangeBytes,
  kSubgroup,
  kPut,
  kArrivals,
};

/// What one rank asks for, with its own copy of everything but the buffers, so that an error message can
/// still speak of a call that is long over. Never changed once it is issued.
struct Call {
  CallKind kind = CallKind::kBarrier;
  DType dtype = DType::kFloat32;
  const void* send = nullptr;
  void* receive = nullptr;
  /// Elements. all-reduce, send: one entry in send_counts; receive: one in receive_counts; reduce-scatter:
  /// chunks in send_counts; all-gather: chunks in receive_counts; subgroup: the ranks listed, in send_counts;
  /// put: bytes, in send_counts.
  std::vector<std::int64_t> send_counts = {};
  std::vector<std::int64_t> receive_counts = {};
  int peer = -1;               ///< send, receive and put: world rank.
  std::string payload = {};    ///< exchange.
  std::string group = {};      ///< "" in the world's own group, else for example " in subgroup {2, 3}".
  std::string operation = {};  ///< From here on: the caller's TransferLabel.
  std::int64_t wave_group = -1;
  std::int64_t transfer = -1;
  std::int64_t slice = -1;

  void set_label(const TransferLabel& label);
};

/// For example "all-reduce of 65536 f32 (gemm-all-reduce m=8 n=8 k=8, group 3, transfer 3)".
std::string describe(const Call& call);

/// "{2, 3}"; long lists are cut: "{1, 2, 3, … 40 in all}".
std::string list_of(const std::vector<std::int64_t>& values);

/// Whether two ranks' calls can be one collective: same kind, type and counts. (What an all-to-all sends and
/// receives may differ; `counts_that_disagree` checks it once all are there.)
bool same_collective(const Call& a, const Call& b);

/// Compares what each rank of an all-to-all sends with what its receiver expects; send and receive likewise
/// (calls[0] sends, calls[1] receives). `world_ranks[i]` is the rank of calls[i]. The reason names ranks and
/// both numbers.
Verdict counts_that_disagree(const std::vector<std::shared_ptr<const Call>>& calls,
                             const std::vector<int>& world_ranks);

}  // namespace flashoverlap::comm
