#include "flashoverlap/dtype.h"

#include <gtest/gtest.h>

#include <string>

#include "flashoverlap/error.h"

namespace flashoverlap {
namespace {

TEST(DTypeTest, NamesAndSizes) {
  EXPECT_EQ(name_of(DType::kFloat32), "f32");
  EXPECT_EQ(name_of(DType::kBFloat16), "bf16");
  EXPECT_EQ(name_of(DType::kFloat16), "f16");
  EXPECT_EQ(size_of(DType::kFloat32), 4);
  EXPECT_EQ(size_of(DType::kBFloat16), 2);
  EXPECT_EQ(size_of(DType::kFloat16), 2);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    EXPECT_EQ(parse_dtype(name_of(dtype)), dtype);
  }
}

TEST(DTypeTest, RefusesOtherNames) {
  for (const char* name : {"", "F32", "f64", "f16 ", "float"}) {
    try {
      (void)parse_dtype(name);
      ADD_FAILURE() << "'" << name << "' was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kBadArgument);
      EXPECT_EQ(std::string(error.what()),
                "type '" + std::string(name) + "' is not known; accepted: f32, bf16, f16");
    }
  }
}

TEST(ErrorTest, EveryKindHasAName) {
  EXPECT_STREQ(name_of(ErrorKind::kBadArgument), "bad argument");
  EXPECT_STREQ(name_of(ErrorKind::kUnsupported), "unsupported");
  EXPECT_STREQ(name_of(ErrorKind::kOutOfMemory), "out of memory");
  EXPECT_STREQ(name_of(ErrorKind::kFile), "file error");
  EXPECT_STREQ(name_of(ErrorKind::kDevice), "device error");
  EXPECT_STREQ(name_of(ErrorKind::kCommunication), "communication error");
  EXPECT_STREQ(name_of(ErrorKind::kTimeout), "time-out");
  EXPECT_STREQ(name_of(ErrorKind::kInternal), "internal error");
}

}  // namespace
}  // namespace flashoverlap
