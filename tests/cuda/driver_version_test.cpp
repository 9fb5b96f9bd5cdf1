/// The driver's version in what its file says.
#include "cuda/driver_version.h"

#include <gtest/gtest.h>

namespace flashoverlap::cuda {
namespace {

TEST(DriverVersionTest, IsTheFirstWordOfNumbersAndDots) {
  EXPECT_EQ(driver_version_in(
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Mon Oct 27 06:18:05 2026\n"
                "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"),
            "580.159.04");
  EXPECT_EQ(
      driver_version_in("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86  Release Build"),
      "570.86");
  EXPECT_EQ(driver_version_in("580.1"), "580.1");
  EXPECT_EQ(driver_version_in("version 580 .1 2. 3..4 1.2a v1.2"), "");
  EXPECT_EQ(driver_version_in(""), "");
}

}  // namespace
}  // namespace flashoverlap::cuda
