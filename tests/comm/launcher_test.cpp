#include "flashoverlap/launcher.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "flashoverlap/error.h"
#include "support/seed.h"

extern char** environ;

namespace flashoverlap::test {
namespace {

using Variables = std::map<std::string, std::string>;

/// Nothing of the launcher that may have started this test is left.
class LauncherTest : public SeededTest {
 protected:
  void SetUp() override { clear(); }
  void TearDown() override { clear(); }

  static void set(const Variables& variables) {
    clear();
    for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
  }
  static std::string error_of(const Variables& variables) {
    set(variables);
    try {
      (void)detect_launch();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kBadArgument);
      return error.what();
    }
    return "";
  }

 private:
  static void clear() {
    std::vector<std::string> names;
    for (char** entry = environ; *entry != nullptr; ++entry) {
      const std::string text = *entry;
      const std::string name = text.substr(0, text.find('='));
      for (const char* prefix : {"FLASHOVERLAP_", "OMPI_COMM_", "PMI_", "MPI_LOCAL", "SLURM_", "RANK",
                                 "WORLD_SIZE", "LOCAL_", "MASTER_"}) {
        if (name.starts_with(prefix) && name != "FLASHOVERLAP_TEST_SEED") names.push_back(name);
      }
    }
    for (const std::string& name : names) ::unsetenv(name.c_str());
  }
};

TEST_F(LauncherTest, NoLauncher) {
  EXPECT_FALSE(detect_launch().has_value());
  set({{"MASTER_ADDR", "a"}, {"LOCAL_RANK", "3"}, {"SLURM_LOCALID", "1"}});
  EXPECT_FALSE(detect_launch().has_value());
  // A batch script is not a rank.
  set({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}});
  EXPECT_FALSE(detect_launch().has_value());
}

TEST_F(LauncherTest, EachLauncher) {
  struct Case {
    Variables variables;
    Launch launch;
  };
  const std::vector<Case> cases = {
      {{{"FLASHOVERLAP_RANK", "2"},
        {"FLASHOVERLAP_WORLD_SIZE", "4"},
        {"FLASHOVERLAP_LOCAL_RANK", "0"},
        {"FLASHOVERLAP_LOCAL_SIZE", "2"},
        {"FLASHOVERLAP_RENDEZVOUS", "node1:29500"}},
       {2, 4, 0, 2, "node1:29500", "FLASHOVERLAP_RANK"}},
      {{{"OMPI_COMM_WORLD_RANK", "5"},
        {"OMPI_COMM_WORLD_SIZE", "8"},
        {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
        {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}},
       {5, 8, 1, 4, "", "OpenMPI"}},
      {{{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}},
       {1, 2, 1, 2, "", "Hydra"}},
      {{{"RANK", "3"},
        {"WORLD_SIZE", "4"},
        {"LOCAL_RANK", "1"},
        {"LOCAL_WORLD_SIZE", "2"},
        {"MASTER_ADDR", "10.0.0.1"},
        {"MASTER_PORT", "29500"}},
       {3, 4, 1, 2, "10.0.0.1:29500", "torchrun"}},
      {{{"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "3"}, {"SLURM_NTASKS", "4"}, {"SLURM_LOCALID", "0"}},
       {3, 4, 0, 0, "", "SLURM"}},
      // A step may have fewer tasks than the job.
      {{{"SLURM_STEP_ID", "1"},
        {"SLURM_PROCID", "1"},
        {"SLURM_NTASKS", "16"},
        {"SLURM_STEP_NUM_TASKS", "2"},
        {"SLURM_LOCALID", "1"}},
       {1, 2, 1, 0, "", "SLURM"}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.launch.launcher);
    set(c.variables);
    const auto launch = detect_launch();
    ASSERT_TRUE(launch.has_value());
    EXPECT_EQ(launch->launcher, c.launch.launcher);
    EXPECT_EQ(launch->rank, c.launch.rank);
    EXPECT_EQ(launch->world_size, c.launch.world_size);
    EXPECT_EQ(launch->local_rank, c.launch.local_rank);
    EXPECT_EQ(launch->local_size, c.launch.local_size);
    EXPECT_EQ(launch->rendezvous, c.launch.rendezvous);
  }
}

TEST_F(LauncherTest, InnerLauncherGoesBeforeOuterAndExplicitBeforeAll) {
  Variables variables = {{"SLURM_STEP_ID", "0"},
                         {"SLURM_PROCID", "0"},
                         {"SLURM_NTASKS", "1"},
                         {"SLURM_LOCALID", "0"},
                         {"OMPI_COMM_WORLD_RANK", "3"},
                         {"OMPI_COMM_WORLD_SIZE", "4"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "3"}};
  set(variables);
  EXPECT_EQ(detect_launch()->launcher, "OpenMPI");
  variables["FLASHOVERLAP_RANK"] = "0";
  variables["FLASHOVERLAP_WORLD_SIZE"] = "1";
  set(variables);
  EXPECT_EQ(detect_launch()->launcher, "FLASHOVERLAP_RANK");
  EXPECT_EQ(detect_launch()->world_size, 1);
}

TEST_F(LauncherTest, ErrorsNameVariableAndValue) {
  EXPECT_EQ(
      error_of({{"OMPI_COMM_WORLD_RANK", "1"}}),
      "the environment has OMPI_COMM_WORLD_RANK=1, but OMPI_COMM_WORLD_SIZE is not set; both are needed");
  EXPECT_EQ(error_of({{"WORLD_SIZE", "4"}}),
            "the environment has WORLD_SIZE=4, but RANK is not set; both are needed");
  EXPECT_EQ(error_of({{"RANK", "4"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "0"}}),
            "the environment contradicts itself: RANK=4, but WORLD_SIZE=4; less is expected");
  EXPECT_EQ(error_of({{"RANK", "1"}, {"WORLD_SIZE", "4"}}),
            "the environment has RANK=1 of 4, but LOCAL_RANK is not set; it is needed when ranks may be on "
            "several hosts");
  EXPECT_EQ(error_of({{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "2"}, {"LOCAL_WORLD_SIZE", "2"}}),
            "the environment contradicts itself: LOCAL_RANK=2, but LOCAL_WORLD_SIZE=2; less is expected");
  EXPECT_EQ(error_of({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_ADDR", "a"}}),
            "the environment has MASTER_ADDR=a, but MASTER_PORT is not set; both are needed");
  for (const std::string value : {" 1", "1 ", "1abc", "1e3", "-1", "99999999999999999999", "0x1", "one"}) {
    EXPECT_EQ(error_of({{"PMI_RANK", value}, {"PMI_SIZE", "2"}}),
              "environment variable PMI_RANK is '" + value + "'; accepted: an integer from 0 to 2147483646");
  }
  for (const std::string value : {"a", ":1", "a:", "a:0", "a:65536", "a:b", "a:-1", "a:123456"}) {
    EXPECT_EQ(error_of({{"FLASHOVERLAP_RANK", "0"},
                        {"FLASHOVERLAP_WORLD_SIZE", "1"},
                        {"FLASHOVERLAP_RENDEZVOUS", value}}),
              "environment variable FLASHOVERLAP_RENDEZVOUS is '" + value +
                  "'; accepted: host:port with a port from 1 to 65535");
  }
}

// 2,000 environments: each is a launch that holds together, or an error that quotes one of the variables.
TEST_F(LauncherTest, AnyEnvironmentIsRightOrAnError) {
  const std::vector<std::string> names = {"FLASHOVERLAP_RANK",
                                          "FLASHOVERLAP_WORLD_SIZE",
                                          "FLASHOVERLAP_LOCAL_RANK",
                                          "FLASHOVERLAP_LOCAL_SIZE",
                                          "FLASHOVERLAP_RENDEZVOUS",
                                          "OMPI_COMM_WORLD_RANK",
                                          "OMPI_COMM_WORLD_SIZE",
                                          "OMPI_COMM_WORLD_LOCAL_RANK",
                                          "OMPI_COMM_WORLD_LOCAL_SIZE",
                                          "PMI_RANK",
                                          "PMI_SIZE",
                                          "MPI_LOCALRANKID",
                                          "MPI_LOCALNRANKS",
                                          "RANK",
                                          "WORLD_SIZE",
                                          "LOCAL_RANK",
                                          "LOCAL_WORLD_SIZE",
                                          "MASTER_ADDR",
                                          "MASTER_PORT",
                                          "SLURM_STEP_ID",
                                          "SLURM_PROCID",
                                          "SLURM_NTASKS",
                                          "SLURM_STEP_NUM_TASKS",
                                          "SLURM_LOCALID"};
  const std::vector<std::string> ranks = {"0", "0", "1", "1", "2", "3"};
  const std::vector<std::string> sizes = {"4", "4", "4", "8", "2"};
  const std::vector<std::string> odd = {"",           " 4 ",   "4abc", "1e3", "-1", "99999999999999999999",
                                        "4294967296", "host:1"};
  int launches = 0;
  int errors = 0;
  for (int i = 0; i < 2000; ++i) {
    Variables variables;
    for (const std::string& name : names) {
      if (pick(0, 2) == 0) continue;
      const bool is_size = name.find("SIZE") != std::string::npos ||
                           name.find("TASKS") != std::string::npos || name == "MPI_LOCALNRANKS";
      const auto& pool = pick(0, 39) == 0 ? odd : is_size ? sizes : ranks;
      variables[name] = pool[static_cast<std::size_t>(pick(0, std::ssize(pool) - 1))];
    }
    set(variables);
    SCOPED_TRACE(::testing::PrintToString(variables));
    try {
      const auto launch = detect_launch();
      if (!launch) continue;
      ++launches;
      EXPECT_LT(launch->rank, launch->world_size);
      EXPECT_GE(launch->rank, 0);
      EXPECT_LT(launch->local_rank, launch->local_size > 0 ? launch->local_size : launch->world_size);
      EXPECT_LE(launch->local_size, launch->world_size);
    } catch (const Error& error) {
      ++errors;
      const std::string message = error.what();
      bool names_one = false;
      for (const auto& [name, value] : variables) {
        names_one |= message.find(name + "=" + value) != std::string::npos ||
                     message.find(name + " is '" + value + "'") != std::string::npos;
      }
      EXPECT_TRUE(names_one) << message;
    }
  }
  EXPECT_GT(launches, 100);
  EXPECT_GT(errors, 100);
}

}  // namespace
}  // namespace flashoverlap::test
