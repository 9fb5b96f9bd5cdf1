#pragma once

#include <memory>

#include "cpu/progress.h"
#include "cpu/run.h"
#include "cpu/transfer_queue.h"
#include "flashoverlap/symmetric_heap.h"

namespace flashoverlap::cpu {

/// This rank's buffers, open to the puts of other ranks for one run. Marks the slices that come.
class PutWindow {
 public:
  PutWindow(const Run::Parts& parts, const BufferTable& buffers, const std::shared_ptr<Progress>& progress);
  ~PutWindow() { heap_.close(); }
  PutWindow(const PutWindow&) = delete;
  PutWindow& operator=(const PutWindow&) = delete;

 private:
  SymmetricHeap& heap_;
};

}  // namespace flashoverlap::cpu
