#include "flashoverlap/tuning_cache.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>
#include <thread>

#include "support/seed.h"
#include "support/throws.h"

namespace flashoverlap {
namespace {

using Json = nlohmann::json;

/// Known fault B33 and its kind.
class Cache : public test::SeededTest {
 protected:
  Cache() {
    folder_ =
        std::filesystem::temp_directory_path() / ("flashoverlap_cache_test_" + std::to_string(::getpid()));
    std::filesystem::remove_all(folder_);
    path_ = (folder_ / "deep" / "tuning.json").string();
  }
  ~Cache() override { std::filesystem::remove_all(folder_); }

  static MachineIdentity identity() { return {"Test CPU", "580.1", {{"openblas", "0.3.21"}}}; }

  TuningCache open(const MachineIdentity& machine = identity()) {
    warnings_.clear();
    return {path_, machine, [this](const std::string& warning) { warnings_.push_back(warning); }};
  }

  static TuningEntry entry(std::int64_t m, std::int64_t world_size = 4) {
    TuningEntry result;
    result.key = {"gemm-all-reduce", m, 512,    256, DType::kFloat32,
                  world_size,        2, "none", "",  "in-process 1 GB/s"};
    result.tile_m = 64;
    result.tile_n = 128;
    result.resources = {2, 0};
    result.partition = {1, 2, 1};
    result.predicted_us = 123.25;
    result.serial_us = 200;
    result.how = "predicted";
    result.date = "2026-11-29";
    return result;
  }

  [[nodiscard]] std::string text() const {
    std::ifstream file(path_);
    std::ostringstream all;
    all << file.rdbuf();
    return all.str();
  }

  void write(const std::string& content) const {
    std::filesystem::create_directories(std::filesystem::path(path_).parent_path());
    std::ofstream(path_) << content;
  }

  /// The only warning, which has `part` in it.
  void expect_warning(const std::string& part) {
    ASSERT_EQ(warnings_.size(), 1U) << part;
    EXPECT_NE(warnings_[0].find(part), std::string::npos) << warnings_[0];
    EXPECT_NE(warnings_[0].find(path_), std::string::npos) << warnings_[0];
  }

  std::filesystem::path folder_;
  std::string path_;
  std::vector<std::string> warnings_;
};

TEST_F(Cache, FindsWhatWasStored) {
  open().store(entry(1024));
  TuningCache cache = open();
  EXPECT_EQ(cache.find(entry(1024).key), entry(1024));
  EXPECT_EQ(cache.find(entry(1025).key), std::nullopt);
  EXPECT_TRUE(warnings_.empty());
}

TEST_F(Cache, AMissingFileIsAnEmptyCache) {
  EXPECT_TRUE(open().entries().empty());
  EXPECT_TRUE(warnings_.empty());
}

TEST_F(Cache, ANewEntryReplacesTheOldOneOfItsKey) {
  TuningCache cache = open();
  cache.store(entry(1024));
  TuningEntry better = entry(1024);
  better.partition = {4};
  cache.store(better);
  EXPECT_EQ(cache.entries().size(), 1U);
  EXPECT_EQ(open().entries(), std::vector{better});
}

TEST_F(Cache, AnotherWorldSizeDoesNotUseTheEntry) {
  open().store(entry(1024, 4));
  EXPECT_EQ(open().find(entry(1024, 2).key), std::nullopt);
  EXPECT_EQ(open().nearest(entry(1024, 2).key), std::nullopt);
}

TEST_F(Cache, EveryPartOfTheKeyCounts) {
  open().store(entry(1024));
  const TuningCache cache = open();
  const auto found = [&](auto change) {
    TuningKey key = entry(1024).key;
    change(key);
    return cache.find(key).has_value();
  };
  EXPECT_TRUE(found([](auto&) {}));
  EXPECT_FALSE(found([](auto& key) { key.operation = "gemm-reduce-scatter"; }));
  EXPECT_FALSE(found([](auto& key) { key.n = 1; }));
  EXPECT_FALSE(found([](auto& key) { key.k = 1; }));
  EXPECT_FALSE(found([](auto& key) { key.dtype = DType::kFloat16; }));
  EXPECT_FALSE(found([](auto& key) { key.units = 3; }));
  EXPECT_FALSE(found([](auto& key) { key.epilogue = "bias"; }));
  EXPECT_FALSE(found([](auto& key) { key.variant = "block-cyclic"; }));
  EXPECT_FALSE(found([](auto& key) { key.communicator = "mpi"; }));
}

TEST_F(Cache, AnotherMachinesEntriesAreIgnoredAndKept) {
  open().store(entry(1024));
  MachineIdentity other = identity();
  other.device = "Other CPU";
  EXPECT_EQ(open(other).find(entry(1024).key), std::nullopt);
  expect_warning("it was tuned on device 'Test CPU', this is 'Other CPU'");
  open(other).store(entry(1024));
  EXPECT_EQ(Json::parse(text())["entries"].size(), 2U);
  EXPECT_EQ(open().find(entry(1024).key), entry(1024));
  other = identity();
  other.driver = "581.0";
  EXPECT_TRUE(open(other).entries().empty());
  other = identity();
  other.libraries["openblas"] = "0.3.22";
  EXPECT_TRUE(open(other).entries().empty());
}

TEST_F(Cache, EditedEntriesAreRefused) {
  open().store(entry(1024));
  const Json sound = Json::parse(text());
  const auto edit = [&](const std::string& pointer, const Json& value) {
    Json edited = sound;
    edited["entries"][0][Json::json_pointer(pointer)] = value;
    write(edited.dump());
    const bool used = open().find(entry(1024).key).has_value();
    EXPECT_FALSE(used) << pointer;
    expect_warning("entries[0]");
  };
  edit("/device", "GPU");
  edit("/key/dtype", "f16");
  edit("/tile_m", 128);
  edit("/version", "9.9.9");
  edit("/partition", {1, 1, 2});
  edit("/predicted_us", 1);
  edit("/checksum", "0000000000000000");
  edit("/checksum", 5);
}

TEST_F(Cache, FilesThatAreNoCacheAreRefusedAndMovedAside) {
  open().store(entry(1024));
  const std::string sound = text();
  for (const std::string& bad :
       {sound.substr(0, sound.size() / 2), std::string(), std::string("\0\1\2", 3), std::string("[]"),
        std::string(R"({"schema": "flashoverlap.tuning-cache/2", "entries": []})"),
        std::string(R"({"entries": {}})")}) {
    write(bad);
    EXPECT_TRUE(open().entries().empty());
    expect_warning("tuning cache refused, calls will be tuned again");
    open().store(entry(7));
    EXPECT_EQ(open().entries(), std::vector{entry(7)});
    std::ifstream aside(path_ + ".refused");
    std::ostringstream kept;
    kept << aside.rdbuf();
    EXPECT_EQ(kept.str(), bad);
  }
}

TEST_F(Cache, EveryCutIsRefused) {
  TuningCache cache = open();
  cache.store(entry(1));
  const std::string sound = text();
  for (std::size_t length = 0; length + 1 < sound.size(); length += 7) {
    const std::string message = test::message_of(ErrorKind::kFile, [&] {
      static_cast<void>(parse_tuning_cache(sound.substr(0, length), "cut", identity(), nullptr));
    });
    EXPECT_EQ(message.rfind("cut: ", 0), 0U) << message;
  }
}

TEST_F(Cache, EightProcessesLoseNothing) {
  constexpr int kProcesses = 8;
  constexpr int kEntries = 12;
  std::vector<pid_t> children;
  for (int process = 0; process < kProcesses; ++process) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      TuningCache cache(path_, identity(), nullptr);
      for (int i = 0; i < kEntries; ++i) cache.store(entry(1000 * (process + 1) + i));
      ::_exit(0);
    }
    children.push_back(child);
  }
  // A reader meanwhile sees nothing but sound files.
  for (int i = 0; i < 50; ++i) {
    static_cast<void>(open());
    EXPECT_TRUE(warnings_.empty()) << warnings_[0];
  }
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  const TuningCache cache = open();
  EXPECT_EQ(cache.entries().size(), static_cast<std::size_t>(kProcesses * kEntries));
  for (int process = 0; process < kProcesses; ++process) {
    for (int i = 0; i < kEntries; ++i) {
      EXPECT_TRUE(cache.find(entry(1000 * (process + 1) + i).key).has_value()) << process << " " << i;
    }
  }
}

TEST_F(Cache, AKilledWriterLeavesASoundFile) {
  open().store(entry(1));
  for (int round = 0; round < 15; ++round) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      TuningCache cache(path_, identity(), nullptr);
      for (int i = 2;; ++i) cache.store(entry(i % 40 + 2));
    }
    ::usleep(static_cast<useconds_t>(pick(500, 9000)));
    ::kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status));
    TuningCache cache = open();
    EXPECT_TRUE(warnings_.empty()) << warnings_[0];
    EXPECT_TRUE(cache.find(entry(1).key).has_value());
    cache.store(entry(1000 + round));  // the dead writer's lock is free
  }
  EXPECT_TRUE(open().find(entry(1014).key).has_value());
}

TEST_F(Cache, NearestIsNearInShapeAndEqualInAllElse) {
  TuningCache cache = open();
  cache.store(entry(1024));
  cache.store(entry(2048));
  TuningKey key = entry(1300).key;
  key.communicator = "in-process 2 GB/s";
  EXPECT_EQ(cache.nearest(key)->key.m, 1024);
  key.m = 1900;
  EXPECT_EQ(cache.nearest(key)->key.m, 2048);
  key.m = 100;
  EXPECT_EQ(cache.nearest(key), std::nullopt);
  key.m = 1900;
  key.dtype = DType::kBFloat16;
  EXPECT_EQ(cache.nearest(key), std::nullopt);
}

TEST_F(Cache, UnwritablePlacesAndBadEntriesAreNamed) {
  TuningEntry bad = entry(1);
  bad.tile_m = 0;
  FLASHOVERLAP_EXPECT_THROW(ErrorKind::kBadArgument, "'entry.tile_m' is 0", open().store(bad));
  bad = entry(1);
  bad.how = "guessed";
  FLASHOVERLAP_EXPECT_THROW(ErrorKind::kBadArgument, "must be predicted or measured", open().store(bad));
  TuningCache nowhere("/proc/nowhere/tuning.json", identity(), nullptr);
  FLASHOVERLAP_EXPECT_THROW(ErrorKind::kFile, "cannot make the folder '/proc/nowhere'",
                            nowhere.store(entry(1)));
}

TEST(CachePath, FollowsTheEnvironment) {
  const char* names[] = {"FLASHOVERLAP_CACHE", "XDG_CACHE_HOME", "HOME"};
  for (const char* name : names) ::unsetenv(name);
  EXPECT_EQ(TuningCache::default_path(), "");
  ::setenv("HOME", "/h", 1);
  EXPECT_EQ(TuningCache::default_path(), "/h/.cache/flashoverlap/tuning.json");
  ::setenv("XDG_CACHE_HOME", "/x", 1);
  EXPECT_EQ(TuningCache::default_path(), "/x/flashoverlap/tuning.json");
  ::setenv("FLASHOVERLAP_CACHE", "/f.json", 1);
  EXPECT_EQ(TuningCache::default_path(), "/f.json");
}

TEST(ScaledPartition, KeepsProportionsAndSums) {
  EXPECT_EQ(scaled_partition({1, 2, 1}, 8), (std::vector<std::int64_t>{2, 4, 2}));
  EXPECT_EQ(scaled_partition({1, 2, 1}, 4), (std::vector<std::int64_t>{1, 2, 1}));
  EXPECT_EQ(scaled_partition({3, 5}, 1), (std::vector<std::int64_t>{1}));
  EXPECT_EQ(scaled_partition({}, 3), (std::vector<std::int64_t>{3}));
  EXPECT_TRUE(scaled_partition({1, 2}, 0).empty());
  for (std::int64_t waves = 1; waves < 60; ++waves) {
    const std::vector<std::int64_t> scaled = scaled_partition({1, 1, 3, 7, 2, 1}, waves);
    EXPECT_EQ(std::accumulate(scaled.begin(), scaled.end(), std::int64_t{0}), waves);
    for (const std::int64_t group : scaled) EXPECT_GT(group, 0);
  }
}

}  // namespace
}  // namespace flashoverlap
