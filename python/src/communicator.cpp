#include <fmt/format.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "array.h"
#include "bindings.h"
#include "core/fail.h"
#include "flashoverlap/communicator.h"
#include "flashoverlap/in_process.h"
#include "flashoverlap/launcher.h"
#include "flashoverlap/mpi.h"

namespace flashoverlap::python {
namespace {

using std::chrono::milliseconds;

milliseconds to_milliseconds(double seconds) {
  constexpr double kMostSeconds = 1e9;
  if (!(seconds >= 1e-3 && seconds <= kMostSeconds)) {
    core::fail(ErrorKind::kBadArgument, "timeout is {} s; expected 0.001 to {}", seconds, kMostSeconds);
  }
  return milliseconds(std::llround(seconds * 1e3));
}

InProcessOptions in_process_options(double bandwidth_gbps, double latency_us, double timeout) {
  InProcessOptions options;
  options.link = {.bandwidth_gbps = bandwidth_gbps, .latency_us = latency_us};
  if (timeout != 0) options.timeout = to_milliseconds(timeout);
  return options;
}

/// function(communicator) returns an empty text, or what went wrong on that rank.
void run_in_threads(int world_size, const InProcessOptions& options, const nb::callable& function) {
  const nb::gil_scoped_release release;
  run_ranks(world_size, options, [&](std::shared_ptr<Communicator> communicator) {
    std::string error;
    {
      const nb::gil_scoped_acquire acquire;
      error = nb::cast<std::string>(function(std::move(communicator)));
    }
    if (!error.empty()) throw Error(ErrorKind::kCommunication, error);
  });
}

/// Blocks until `call`, put into a stream of its own, is done.
template <typename Call>
void on_stream(Communicator& communicator, const Call& call) {
  const nb::gil_scoped_release release;
  const std::unique_ptr<Stream> stream = communicator.make_stream("python");
  call(*stream);
  stream->synchronize();
}

void require_dense(const Array& array) {
  if (array.is_dense()) return;
  core::fail(ErrorKind::kBadArgument, "{} has gaps (strides {}); expected a C-contiguous array",
             array.description(), fmt::join(array.strides, ", "));
}

void require_same_type(const Array& send, const Array& receive) {
  require_dense(send);
  require_dense(receive);
  if (send.dtype == receive.dtype) return;
  core::fail(ErrorKind::kBadArgument, "{} and {} differ in type", send.description(), receive.description());
}

void require_counts(const Array& whole, const Array& part, const std::vector<std::int64_t>& counts,
                    int rank) {
  const std::int64_t sum = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  if (std::cmp_less_equal(counts.size(), rank) || sum != whole.size() ||
      counts[static_cast<std::size_t>(rank)] != part.size()) {
    core::fail(ErrorKind::kBadArgument, "{} and {} do not fit the counts {} of rank {}", whole.description(),
               part.description(), fmt::join(counts, ", "), rank);
  }
}

void all_reduce(Communicator& communicator, const Array& send, const Array& receive) {
  require_same_type(send, receive);
  if (send.size() != receive.size()) {
    core::fail(ErrorKind::kBadArgument, "{} and {} differ in size", send.description(),
               receive.description());
  }
  on_stream(communicator, [&](Stream& stream) {
    communicator.all_reduce(send.data, receive.data, send.size(), send.dtype, stream,
                            {.operation = "all-reduce"});
  });
}

void all_gather(Communicator& communicator, const Array& send, const Array& receive,
                const std::vector<std::int64_t>& counts) {
  require_same_type(send, receive);
  require_counts(receive, send, counts, communicator.rank());
  on_stream(communicator, [&](Stream& stream) {
    communicator.all_gather(send.data, receive.data, counts, send.dtype, stream, {.operation = "all-gather"});
  });
}

void reduce_scatter(Communicator& communicator, const Array& send, const Array& receive,
                    const std::vector<std::int64_t>& counts) {
  require_same_type(send, receive);
  require_counts(send, receive, counts, communicator.rank());
  on_stream(communicator, [&](Stream& stream) {
    communicator.reduce_scatter(send.data, receive.data, counts, send.dtype, stream,
                                {.operation = "reduce-scatter"});
  });
}

std::vector<nb::bytes> exchange(Communicator& communicator, const nb::bytes& value) {
  const std::string mine(value.c_str(), value.size());
  std::vector<std::string> all;
  {
    const nb::gil_scoped_release release;
    all = communicator.exchange(mine, TransferLabel{.operation = "exchange"});
  }
  std::vector<nb::bytes> values;
  for (const std::string& one : all) values.emplace_back(one.data(), one.size());
  return values;
}

nb::object detected_launch() {
  const std::optional<Launch> launch = detect_launch();
  if (!launch) return nb::none();
  nb::dict dict;
  dict["rank"] = launch->rank;
  dict["world_size"] = launch->world_size;
  dict["local_rank"] = launch->local_rank;
  dict["local_size"] = launch->local_size;
  dict["launcher"] = launch->launcher;
  return dict;
}

}  // namespace

void bind_communicator(nb::module_& module) {
  nb::class_<Communicator>(module, "Communicator")
      .def_prop_ro("rank", &Communicator::rank)
      .def_prop_ro("size", &Communicator::size)
      .def_prop_ro("name", [](const Communicator& self) { return std::string(self.name()); })
      .def("all_reduce", all_reduce, nb::arg("send"), nb::arg("receive"))
      .def("all_gather", all_gather, nb::arg("send"), nb::arg("receive"), nb::arg("counts"))
      .def("reduce_scatter", reduce_scatter, nb::arg("send"), nb::arg("receive"), nb::arg("counts"))
      .def("barrier",
           [](Communicator& self) {
             on_stream(self, [&](Stream& stream) { self.barrier(stream, {.operation = "barrier"}); });
           })
      .def("exchange", exchange, nb::arg("value"))
      .def(
          "subgroup",
          [](Communicator& self, const std::vector<int>& ranks) {
            const nb::gil_scoped_release release;
            return self.subgroup(ranks);
          },
          nb::arg("ranks"))
      .def("abort", &Communicator::abort, nb::arg("reason"), nb::call_guard<nb::gil_scoped_release>())
      .def_prop_rw(
          "timeout",
          [](const Communicator& self) { return static_cast<double>(self.timeout().count()) / 1e3; },
          [](Communicator& self, double seconds) { self.set_timeout(to_milliseconds(seconds)); });

  module.def(
      "run_ranks",
      [](int world_size, const nb::callable& function, double bandwidth_gbps, double latency_us,
         double timeout) {
        run_in_threads(world_size, in_process_options(bandwidth_gbps, latency_us, timeout), function);
      },
      nb::arg("world_size"), nb::arg("function"), nb::arg("bandwidth_gbps"), nb::arg("latency_us"),
      nb::arg("timeout"));
  module.def(
      "in_process_communicators", [](int world_size) { return make_in_process_communicators(world_size); },
      nb::arg("world_size"));
  module.def("detect_launch", detected_launch, nb::sig("def detect_launch() -> dict | None"));
  module.def("mpi_library_name", mpi_library_name);
  module.def(
      "make_mpi_communicator", [] { return make_mpi_communicator(); },
      nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace flashoverlap::python
