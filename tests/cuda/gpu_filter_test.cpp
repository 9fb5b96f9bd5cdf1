/// Which of the GPU tests a filter names.
#include <gtest/gtest.h>

#include "gpu/gpu_test.h"

namespace flashoverlap::gpu_test {
namespace {

TEST(GpuFilterTest, PartsNameAndExclude) {
  EXPECT_TRUE(is_wanted("edges", ""));
  EXPECT_TRUE(is_wanted("edges", "dge"));
  EXPECT_FALSE(is_wanted("edges", "collectives"));
  EXPECT_TRUE(is_wanted("edges", "collectives,edges"));
  EXPECT_FALSE(is_wanted("nccl_failures_all_reduce", "-nccl_failures"));
  EXPECT_TRUE(is_wanted("edges", "-nccl_failures,-without_one_rank"));
  EXPECT_TRUE(is_wanted("collectives", "collectives,-one_rank"));
  EXPECT_FALSE(is_wanted("one_rank_collectives", "collectives,-one_rank"));
  EXPECT_FALSE(is_wanted("edges", "collectives,-one_rank"));
  EXPECT_TRUE(is_wanted("edges", ",-"));
}

}  // namespace
}  // namespace flashoverlap::gpu_test
