#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/mpi/mpi_world.h"

namespace flashoverlap::comm::mpi {

/// The service thread: reads the control channels of all worlds of this process. It looks every 50 ms, and
/// more often while somebody waits for an answer. Never destroyed; `stop` ends the thread.
class Service {
 public:
  static Service& instance();

  void add(std::shared_ptr<MpiWorld> world);
  void wake();

  /// Some rank will not take part in MPI_Finalize: it is gone, or messages of its own never end.
  void note_lost_rank();
  [[nodiscard]] bool has_lost_rank();

  /// Says good-bye and stops. True when all worlds came to a good end: all of their ranks have finished, and
  /// take part in MPI_Finalize. While a rank is at work and answers, this waits for it. False when one does
  /// not answer after `patience`, when one has not finished 4 s after a failure (then the others have seen it
  /// too), or when a rank is lost.
  bool stop(std::chrono::milliseconds patience);

 private:
  void run();
  void serve_all();
  [[nodiscard]] std::vector<std::shared_ptr<MpiWorld>> worlds();
  bool wait_for_good_end(std::chrono::milliseconds patience);

  std::mutex mutex_;
  std::condition_variable woken_;
  std::vector<std::shared_ptr<MpiWorld>> worlds_;
  std::thread thread_;
  bool is_stopping_ = false;
  bool is_woken_ = false;
  bool has_lost_rank_ = false;
};

}  // namespace flashoverlap::comm::mpi
