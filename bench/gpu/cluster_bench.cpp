// What is measured on a machine of several GPUs, in parts that scripts/gpu_cluster_bench.py calls:
//
//   cluster_bench topology [--json FILE]            devices, and which of them address each other's memory
//   cluster_bench curves --ranks W [--rehearse] [--sms-communication 16] [--json FILE]
//                                                   bandwidth curves and GEMMs as a machine profile
//   cluster_bench table --ranks W [--rehearse] [--ops ag,ar,rs] [--shapes MxNxK,...] [--ways nccl:16,...]
//                       [--rounds 5] [--budget-s 0] [--json FILE] [--trace FILE]
//                                                   serial against overlapped; one JSON object a case and
//                                                   line
//
// Rank r is a thread on device r; with --rehearse all are on device 0, each on SMs of its own. Started by a
// launcher as one of several processes it is one rank, on the device of its local rank, and rank 0 prints.
// With
// --budget-s no case begins after so many seconds. A way is a communicator (gpu_test::CommunicatorKind) and
// the SMs that the GEMM leaves to it; of the ways that suit an operator the quickest is taken, and with it
// the quickest partition (operator_bench.h). Serial has all SMs and an NCCL communicator that takes what it
// likes; in a rehearsal it shares the first way's. The GEMM is the one that the executor suggests, as users
// get it. Without a CUDA device: "skipped: no CUDA device".
#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <numeric>
#include <stdexcept>

#include "check.h"
#include "flashoverlap/cuda_context.h"
#include "flashoverlap/launcher.h"
#include "measure_machine.h"
#include "nccl_library.h"
#include "operator_bench.h"
#include "runtime_library.h"

namespace {

using namespace flashoverlap;
using gpu_test::Group;
using gpu_test::GroupOptions;
using gpu_test::Rank;
using Clock = std::chrono::steady_clock;

/// "--name value" pairs; "--rehearse" alone.
class Arguments {
 public:
  Arguments(int argc, char** argv, int first) {
    for (int i = first; i < argc; ++i) {
      const std::string name = argv[i];
      if (name == "--rehearse") {
        values_.insert_or_assign(name, std::string("1"));
      } else if (!name.starts_with("--")) {
        throw std::runtime_error(fmt::format("'{}' is not an option", name));
      } else if (i + 1 == argc) {
        throw std::runtime_error(fmt::format("{} has no value", name));
      } else {
        values_[name] = argv[++i];
      }
    }
  }
  std::string take(const std::string& name, const std::string& otherwise) {
    const auto found = values_.find(name);
    if (found == values_.end()) return otherwise;
    std::string value = found->second;
    values_.erase(found);
    return value;
  }
  int take_int(const std::string& name, int otherwise) {
    const std::string text = take(name, std::to_string(otherwise));
    std::size_t used = 0;
    const int value = text.empty() ? -1 : std::stoi(text, &used);
    if (used != text.size() || value < 0)
      throw std::runtime_error(fmt::format("{} {}: expected an integer >= 0", name, text));
    return value;
  }
  void expect_none_left() const {
    if (!values_.empty())
      throw std::runtime_error(fmt::format("{} is not accepted here", values_.begin()->first));
  }

 private:
  std::map<std::string, std::string> values_;
};

int print_topology(Arguments& arguments) {
  const std::string path = arguments.take("--json", "");
  arguments.expect_none_left();
  std::string json = "{\"devices\":[";
  const int count = cuda_device_count();
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties{};
    FLASHOVERLAP_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    std::string peers;
    for (int peer = 0; peer < count; ++peer) {
      int reachable = 0;
      if (peer != device) FLASHOVERLAP_CUDA_CHECK(cudaDeviceCanAccessPeer(&reachable, device, peer));
      if (reachable != 0) peers += fmt::format("{}{}", peers.empty() ? "" : ",", peer);
    }
    fmt::print("device {}: {}, {} SMs, {} MiB, addresses the memory of [{}]\n", device, properties.name,
               properties.multiProcessorCount, properties.totalGlobalMem >> 20U, peers);
    json += fmt::format(R"({}{{"name":"{}","sms":{},"peers":[{}]}})", device == 0 ? "" : ",", properties.name,
                        properties.multiProcessorCount, peers);
  }
  const cuda::NcclLibrary& nccl = cuda::nccl();
  fmt::print("NCCL {} ({})\n", cuda::library_version_text(nccl.version), nccl.path);
  json += fmt::format("],\"nccl\":\"{}\"}}\n", cuda::library_version_text(nccl.version));
  if (!path.empty()) std::ofstream(path) << json;
  return 0;
}

/// Where ranks run: each on a device of its own, or all on one.
int place(Arguments& arguments, bool& rehearse) {
  const int world = arguments.take_int("--ranks", 2);
  rehearse = !arguments.take("--rehearse", "").empty();
  if (world < 2) throw std::runtime_error(fmt::format("--ranks {}: at least 2", world));
  if (const auto launch = detect_launch(); launch && launch->world_size > 1) {
    if (rehearse || launch->world_size != world) {
      throw std::runtime_error(fmt::format("--ranks {}{}, but a launcher started {} processes", world,
                                           rehearse ? " --rehearse" : "", launch->world_size));
    }
    gpu_test::use_processes(*launch);
    if (!gpu_test::has_devices_for(world)) throw std::runtime_error("each process needs a device of its own");
    return world;
  }
  std::vector<int> devices;
  for (int device = 0; !rehearse && device < cuda_device_count(); ++device) devices.push_back(device);
  if (!rehearse && std::ssize(devices) < world) {
    throw std::runtime_error(
        fmt::format("--ranks {}, but {} devices here; --rehearse puts all on one", world, devices.size()));
  }
  gpu_test::use_devices(devices);
  return world;
}

int measure_curves(Arguments& arguments) {
  cuda::MachineSettings settings;
  bool rehearse = false;
  const int world = place(arguments, rehearse);
  if (const auto launch = detect_launch(); launch && launch->world_size > 1)
    throw std::runtime_error("curves are measured by threads of one process; leave the launcher out");
  settings.devices.assign(static_cast<std::size_t>(world), 0);
  if (!rehearse) std::iota(settings.devices.begin(), settings.devices.end(), 0);
  settings.measured_by = fmt::format("cluster_bench curves --ranks {}", world);
  settings.communication_sms.clear();
  for (const std::string& part : bench::split(arguments.take("--sms-communication", "16")))
    settings.communication_sms.push_back(std::stoi(part));
  const std::string path = arguments.take("--json", "profile.json");
  arguments.expect_none_left();
  const MachineProfile profile = cuda::measure_machine(settings);
  for (const CommunicationCurve& curve : profile.curves) {
    fmt::print("{} of {} ranks on {} SMs:", name_of(curve.collective), curve.world_size, curve.units);
    for (const CurvePoint& point : curve.curve.points())
      fmt::print(" {:.0f} KiB {:.1f} us {:.1f} GB/s,", point.bytes / 1024, point.time_us,
                 point.bytes / point.time_us / 1e3);
    fmt::print("\n");
  }
  std::ofstream file(path);
  file << to_json(profile);
  file.close();
  // Whoever reads it finds it as it was meant.
  (void)load_machine_profile(path.find('/') == std::string::npos ? fmt::format("./{}", path) : path);
  return 0;
}

/// How ranks exchange while they compute.
struct Way {
  gpu_test::CommunicatorKind kind = gpu_test::CommunicatorKind::kNccl;
  int sms = 0;  ///< Left to communication by the GEMM.

  [[nodiscard]] std::string text() const { return fmt::format("{}:{}", gpu_test::name_of(kind), sms); }
  /// Who adds needs SMs, and where nothing is added two steps are one.
  [[nodiscard]] bool suits(const std::string& op) const {
    if (op == "ag" || op == "a2a") return kind != gpu_test::CommunicatorKind::kTwoStep;
    return sms > 0 || kind == gpu_test::CommunicatorKind::kCopyEngine;
  }
};

std::vector<Way> parse_ways(const std::string& text) {
  using gpu_test::CommunicatorKind;
  std::vector<Way> ways;
  for (const std::string& part : bench::split(text)) {
    Way way;
    const std::size_t colon = std::min(part.find(':'), part.size());
    const std::string name = part.substr(0, colon);
    bool is_known = false;
    for (const auto kind :
         {CommunicatorKind::kNccl, CommunicatorKind::kNcclRegistered, CommunicatorKind::kNcclSymmetric,
          CommunicatorKind::kLocal, CommunicatorKind::kTwoStep, CommunicatorKind::kCopyEngine}) {
      if (name != gpu_test::name_of(kind)) continue;
      way.kind = kind;
      is_known = true;
    }
    char rest = 0;
    if (!is_known || colon == part.size() ||
        std::sscanf(part.c_str() + colon + 1, "%d%c", &way.sms, &rest) != 1 || way.sms < 0) {
      throw std::runtime_error(fmt::format(
          "--ways has '{}', expected nccl:SMS, nccl-registered:SMS, nccl-symmetric:SMS, local:SMS, "
          "two-step:SMS or copy-engine:SMS",
          part));
    }
    ways.push_back(way);
  }
  return ways;
}

struct TableSettings {
  int world = 2;
  bool rehearse = false;
  std::vector<std::string> ops;
  std::vector<bench::Shape> shapes;
  std::vector<Way> ways;
  bench::OperatorSettings bench;
  int budget_s = 0;
  std::string json, trace;
};

TableSettings read_table(Arguments& arguments) {
  TableSettings settings;
  settings.world = place(arguments, settings.rehearse);
  settings.ops = bench::split(arguments.take("--ops", "ag,ar,rs"));
  settings.shapes = bench::parse_shapes(arguments.take("--shapes", "4096x8192x2048"));
  settings.ways = parse_ways(arguments.take(
      "--ways",
      settings.rehearse ? "nccl:24" : "copy-engine:0,copy-engine:2,local:8,local:16,local:24,nccl:24"));
  settings.bench.rounds = std::max(1, arguments.take_int("--rounds", 5));
  settings.bench.pause_ms = arguments.take_int("--pause-ms", 5);
  settings.bench.search_gemm = false;
  settings.budget_s = arguments.take_int("--budget-s", 0);
  settings.json = arguments.take("--json", "");
  settings.trace = arguments.take("--trace", "");
  arguments.expect_none_left();
  return settings;
}

void print_case(const bench::Result& r) {
  const double bound = r.us.serial - std::min(r.us.cublas, r.us.communication);
  fmt::print(
      "{} {} {}x{}x{}: cuBLAS {:.0f} signal {:.0f} collective {:.0f} serial {:.0f} overlapped {:.0f} ({}, "
      "{}) default {:.0f} bound {:.0f} speed-up {:.3f} predicted {:.0f} wrong {}\n",
      r.ranks, r.op, r.shape.m, r.shape.n, r.shape.k, r.us.cublas, r.us.signal, r.us.communication,
      r.us.serial, r.us.overlapped, r.method, bench::text_of(r.partition), r.us.by_default, bound,
      r.us.serial / r.us.overlapped, r.predicted_us, r.wrong);
  std::fflush(stdout);
}

/// The groups of all ways, and what serial runs on.
class Table {
 public:
  explicit Table(const TableSettings& settings) : settings_(settings) {
    for (const Way& way : settings.ways) groups_.push_back(make_group(way, true));
    // All of NCCL; but ranks that share a GPU must keep to their SMs.
    if (!settings.rehearse) serial_ = make_group({}, false);
  }

  /// One case, on all ranks; rank 0's result. `timeline`: not null: traced calls of all ranks go there.
  bench::Result measure(const std::string& op, const bench::Shape& shape, Timeline* timeline) {
    const std::size_t chosen = choose(op, shape);
    bench::OperatorSettings settings = settings_.bench;
    settings.communication_sms = settings_.ways[chosen].sms;
    bench::Result first;
    std::mutex mutex;
    unsigned wrong = 0;
    groups_[chosen]->run([&](Rank& rank) {
      Timeline own;
      bench::OperatorBench bench(rank, settings, op, shape, serial_communicator(rank.rank));
      const bench::Result result = bench.measure(timeline == nullptr ? nullptr : &own);
      const std::scoped_lock lock(mutex);
      if (timeline != nullptr)
        timeline->spans.insert(timeline->spans.end(), own.spans.begin(), own.spans.end());
      wrong += result.wrong;
      if (rank.rank == groups_[chosen]->first_rank()) first = result;
    });
    first.wrong = wrong;
    chosen_ = chosen;
    if (first.method != "serial") first.method += ", " + settings_.ways[chosen].text();
    return first;
  }
  /// Whether rank 0 is in this process.
  [[nodiscard]] bool prints() const { return groups_.front()->first_rank() == 0; }
  /// Rank 0's word, on all.
  [[nodiscard]] bool agree(bool value) const {
    if (!gpu_test::ranks_are_processes()) return value;
    Communicator& ranks = *groups_.front()->communicator_of(groups_.front()->first_rank());
    return ranks.exchange(std::uint64_t{value}, {.operation = "cluster_bench"}).front() != 0;
  }
  /// Of the last case.
  [[nodiscard]] const char* communicator() const { return gpu_test::name_of(settings_.ways[chosen_].kind); }

 private:
  [[nodiscard]] std::unique_ptr<Group> make_group(const Way& way, bool limits_nccl) const {
    GroupOptions options;
    options.world_size = settings_.world;
    options.kind = way.kind;
    options.communication_sms = way.sms;
    options.limits_nccl = limits_nccl;
    if (way.sms == 0) options.wait = GroupWait::kStreamMemory;  // a kernel would find no SM
    options.poison = false;
    options.timeout = std::chrono::milliseconds(15'000);
    return std::make_unique<Group>(options);
  }

  std::shared_ptr<Communicator> serial_communicator(int rank) const {
    return serial_ == nullptr ? nullptr : serial_->communicator_of(rank);
  }

  /// The way with the quickest overlapped call.
  std::size_t choose(const std::string& op, const bench::Shape& shape) {
    std::size_t best = groups_.size();
    double best_us = 0;
    for (std::size_t i = 0; i < groups_.size(); ++i) {
      if (!settings_.ways[i].suits(op)) continue;
      bench::OperatorSettings settings = settings_.bench;
      settings.communication_sms = settings_.ways[i].sms;
      double us = 0;
      groups_[i]->run([&](Rank& rank) {
        bench::OperatorBench bench(rank, settings, op, shape, serial_communicator(rank.rank));
        const double quickest = bench.quickest_us();
        if (rank.rank == groups_[i]->first_rank()) us = quickest;  // the same on all
      });
      if (prints())
        fmt::print("  {} {}x{}x{}, {}: {:.0f} us\n", op, shape.m, shape.n, shape.k, settings_.ways[i].text(),
                   us);
      if (best < groups_.size() && us >= best_us) continue;
      best = i;
      best_us = us;
    }
    if (best == groups_.size()) throw std::runtime_error(fmt::format("none of --ways suits {}", op));
    return best;
  }

  const TableSettings& settings_;
  std::vector<std::unique_ptr<Group>> groups_;
  std::unique_ptr<Group> serial_;
  std::size_t chosen_ = 0;
};

int measure_table(Arguments& arguments) {
  const TableSettings settings = read_table(arguments);
  const auto begin = Clock::now();
  const auto is_late = [&] {
    return settings.budget_s > 0 && Clock::now() - begin > std::chrono::seconds(settings.budget_s);
  };
  Table table(settings);
  std::ofstream json(settings.json.empty() || !table.prints() ? "/dev/null" : settings.json);
  Timeline timeline;
  unsigned wrong = 0;
  std::size_t left_out = 0;
  for (const bench::Shape& shape : settings.shapes) {
    for (const std::string& op : settings.ops) {
      if (table.agree(is_late())) {
        ++left_out;
        continue;
      }
      const bool is_traced = !settings.trace.empty() && timeline.spans.empty();
      const bench::Result result = table.measure(op, shape, is_traced ? &timeline : nullptr);
      wrong += result.wrong;
      if (!table.prints()) continue;
      print_case(result);
      bench::append_json(json, result, table.communicator());
    }
  }
  if (!settings.trace.empty() && table.prints()) {
    std::ofstream trace(settings.trace);
    write_chrome_trace(timeline, trace);
  }
  if (left_out > 0) fmt::print("{} cases left out: --budget-s {}\n", left_out, settings.budget_s);
  std::puts(wrong == 0 ? "OK" : "FAILED: elements differ");
  return wrong == 0 ? 0 : 1;
}

int run(int argc, char** argv) {
  const std::string part = argc > 1 ? argv[1] : "";
  Arguments arguments(argc, argv, 2);
  if (part == "topology") return print_topology(arguments);
  if (part == "curves") return measure_curves(arguments);
  if (part == "table") {
    const int code = measure_table(arguments);
    gpu_test::leave_processes();
    return code;
  }
  throw std::runtime_error(fmt::format("'{}' is not one of topology, curves, table", part));
}

}  // namespace

int main(int argc, char** argv) {
  cuda::prepare_environment();
  setenv("NCCL_NVLS_ENABLE", "0", 0);
  if (cuda_device_count() == 0) {
    std::printf("skipped: no CUDA device\n");
    return 0;
  }
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cluster_bench: %s\n", error.what());
    return 2;
  }
}
