/// What is said where NVSHMEM cannot be used.
#include "cuda/nvshmem_library.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "flashoverlap/error.h"

namespace flashoverlap::cuda {
namespace {

std::string error_of(const std::string& path) {
  try {
    (void)load_nvshmem(path);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
    return error.what();
  }
  return "none";
}

std::string error_of_version(const char* version) {
  setenv("FLASHOVERLAP_TEST_NVSHMEM", version, 1);
  return error_of(FLASHOVERLAP_OLD_NVSHMEM);
}

TEST(NvshmemLibraryTest, NamesThePathAndHowToInstall) {
  const std::string error = error_of("/nonexistent/libnvshmem_host.so.3");
  for (const char* part : {"cannot be loaded from /nonexistent/libnvshmem_host.so.3: ", "No such file",
                           "pip install nvidia-nvshmem-cu13", "FLASHOVERLAP_NVSHMEM_LIBRARY"})
    EXPECT_NE(error.find(part), std::string::npos) << error;
}

TEST(NvshmemLibraryTest, NamesVersionsThatAreTooOld) {
  for (const char* version : {"2.11.0", "3.3.24", "3.4.4"}) {
    const std::string error = error_of_version(version);
    EXPECT_NE(error.find(std::string(" is NVSHMEM ") + version + "; 3.4.5 or later is needed"),
              std::string::npos)
        << error;
  }
}

TEST(NvshmemLibraryTest, NamesTheFunctionThatIsMissing) {
  for (const char* version : {"3.4.5", "4.0.0"}) {
    const std::string error = error_of_version(version);
    EXPECT_NE(error.find(" has no nvshmemx_get_uniqueid; NVSHMEM 3.4.5 or later has it"), std::string::npos)
        << error;
  }
}

TEST(NvshmemLibraryTest, NamesALibraryOfSomethingElse) {
  const std::string error = error_of("libm.so.6");
  EXPECT_NE(error.find("libm.so.6 has no nvshmemx_vendor_get_version_info"), std::string::npos) << error;
}

// Not over what the user has set.
TEST(NvshmemLibraryTest, TurnsOffWhatNobodyUses) {
  unsetenv("NVSHMEM_DISABLE_NVLS");
  setenv("NVSHMEM_DISABLE_NCCL", "0", 1);
  (void)error_of("/nonexistent");
  EXPECT_STREQ(std::getenv("NVSHMEM_DISABLE_NVLS"), "1");
  EXPECT_STREQ(std::getenv("NVSHMEM_DISABLE_NCCL"), "0");
}

}  // namespace
}  // namespace flashoverlap::cuda
