#include "flashoverlap/machine_profile.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "support/throws.h"

namespace flashoverlap {
namespace {

using Json = nlohmann::json;

constexpr auto kFile = ErrorKind::kFile;
constexpr auto kBadArgument = ErrorKind::kBadArgument;

/// A small profile that holds, to be broken in one place at a time.
Json good() {
  return Json::parse(R"({
    "schema": "flashoverlap.machine-profile/1", "name": "test", "description": "for tests",
    "provenance": {"kind": "measured", "date": "2026-11-29", "device": "cpu", "driver": "",
                   "libraries": {"openblas": "0.3"}, "sources": ["here"]},
    "units": 8,
    "gemm": {"launch_us": 5,
             "kernels": [{"dtype": "f32", "tile_m": 64, "tile_n": 64, "overhead_us": 1, "unit_gflops": 20,
                          "ragged": "proportional", "source": "s"}],
             "samples": [{"m": 64, "n": 64, "k": 64, "dtype": "f32", "tile_m": 64, "tile_n": 64, "units": 8,
                          "duration_us": 40}]},
    "signal_us": 2, "restore_us_per_mib": 3, "slowdown": 1.1, "steal_us_per_mib": 4,
    "curves": [{"collective": "all-reduce", "world_size": 4, "units": 0, "source": "s",
                "points": [{"bytes": 1048576, "gbps": 100}, {"bytes": 1024, "time_us": 9, "spread_us": 1}]}],
    "levels": [{"name": "node", "ranks": 4, "latency_us": 2, "bandwidth_gbps": 100, "source": "s"},
               {"name": "net", "ranks": 0, "ports": 2, "latency_us": 10, "latency_grows": true,
                "bandwidth_gbps": 10, "source": "s"}]})");
}

MachineProfile parse(const Json& json) {
  return parse_machine_profile(json.dump(), "test.json");
}

std::string refusal(const std::string& pointer, const Json& value) {
  Json json = good();
  json[Json::json_pointer(pointer)] = value;
  return test::message_of(kFile, [&] { static_cast<void>(parse(json)); });
}

std::string without(const std::string& parent, const std::string& field) {
  Json json = good();
  json[Json::json_pointer(parent)].erase(field);
  return test::message_of(kFile, [&] { static_cast<void>(parse(json)); });
}

TEST(MachineProfile, IsReadAsWritten) {
  const MachineProfile profile = parse(good());
  EXPECT_EQ(profile.name, "test");
  EXPECT_EQ(profile.units, 8);
  EXPECT_EQ(profile.provenance.libraries.at("openblas"), "0.3");
  EXPECT_EQ(profile.gemm.kernels.at(0).ragged, RaggedTiles::kProportional);
  EXPECT_EQ(profile.gemm.samples.at(0).duration_us, 40);
  ASSERT_EQ(profile.curves.size(), 1U);
  EXPECT_EQ(profile.curves[0].curve.points()[0], (CurvePoint{1024, 9, 1}));
  EXPECT_NEAR(profile.curves[0].curve.points()[1].time_us, 10.48576, 1e-9);
  EXPECT_EQ(profile.levels.at(1).ports, 2);
  EXPECT_TRUE(profile.levels.at(1).latency_grows);
}

TEST(MachineProfile, JsonGoesAroundWithoutLoss) {
  const MachineProfile profile = parse(good());
  EXPECT_EQ(parse_machine_profile(to_json(profile), "again"), profile);
  for (const std::string& name : shipped_machine_profiles()) {
    const MachineProfile shipped = load_machine_profile(name);
    EXPECT_EQ(shipped.name, name);
    EXPECT_EQ(parse_machine_profile(to_json(shipped), name), shipped);
  }
}

TEST(MachineProfile, EveryShippedNumberHasASource) {
  ASSERT_EQ(shipped_machine_profiles().size(), 8U);
  for (const std::string& name : shipped_machine_profiles()) {
    const MachineProfile profile = load_machine_profile(name);
    EXPECT_FALSE(profile.provenance.sources.empty()) << name;
    for (const GemmKernel& kernel : profile.gemm.kernels) EXPECT_GT(kernel.source.size(), 10U) << name;
    for (const CommunicationCurve& curve : profile.curves) EXPECT_GT(curve.source.size(), 10U) << name;
    for (const TopologyLevel& level : profile.levels) EXPECT_GT(level.source.size(), 10U) << name;
  }
}

TEST(MachineProfile, PointsAreRepairedAsTheCurveDocuments) {
  Json json = good();
  json["curves"][0]["points"] = Json::parse(
      R"([{"bytes": 4194304, "gbps": 120}, {"bytes": 2097152, "gbps": 50}, {"bytes": 1048576, "gbps": 100}])");
  const BandwidthCurve curve = parse(json).curves.at(0).curve;
  EXPECT_EQ(curve.time_us(2097152), curve.time_us(4194304));
  EXPECT_GT(curve.num_repaired(), 0);
}

TEST(MachineProfile, EveryCutIsRefusedWithTheFileName) {
  const std::string text = good().dump();
  for (std::size_t length = 0; length < text.size(); ++length) {
    const std::string message = test::message_of(
        kFile, [&] { static_cast<void>(parse_machine_profile(text.substr(0, length), "cut.json")); });
    ASSERT_EQ(message.rfind("cut.json: ", 0), 0U) << message;
  }
  FLASHOVERLAP_EXPECT_THROW(kFile, "the file is empty", static_cast<void>(parse_machine_profile("", "x")));
  FLASHOVERLAP_EXPECT_THROW(kFile, "not valid JSON",
                            static_cast<void>(parse_machine_profile(text + "}", "x")));
  FLASHOVERLAP_EXPECT_THROW(kFile, "the top level is [], must be an object",
                            static_cast<void>(parse_machine_profile("[]", "x")));
}

TEST(MachineProfile, RefusalsNameFileFieldValueAndWhatItMustBe) {
  EXPECT_EQ(refusal("/schema", "flashoverlap.machine-profile/2"),
            "test.json: field 'schema' is \"flashoverlap.machine-profile/2\", this version reads "
            "\"flashoverlap.machine-profile/1\"");
  EXPECT_EQ(refusal("/units", 0), "test.json: field 'units' is 0, must be an integer in [1, 1048576]");
  EXPECT_EQ(refusal("/units", 2.5), "test.json: field 'units' is 2.5, must be an integer in [1, 1048576]");
  EXPECT_EQ(refusal("/signal_us", -1),
            "test.json: field 'signal_us' is -1, must be a number in [0, 1000000000000]");
  EXPECT_EQ(refusal("/signal_us", nullptr),
            "test.json: field 'signal_us' is null, must be a number in [0, 1000000000000]");
  EXPECT_EQ(refusal("/name", 3), "test.json: field 'name' is 3, must be a string");
  EXPECT_EQ(refusal("/curves/0/points/0/gbps", 0),
            "test.json: field 'curves[0].points[0].gbps' is 0, must be a number in [1e-09, 1000000000]");
  EXPECT_EQ(refusal("/curves/0/points/0/gbps", -5),
            "test.json: field 'curves[0].points[0].gbps' is -5, must be a number in [1e-09, 1000000000]");
  EXPECT_EQ(refusal("/curves/0/points/0/bytes", 0),
            "test.json: field 'curves[0].points[0].bytes' is 0, must be a number in [1, 9007199254740992]");
  EXPECT_EQ(refusal("/curves/0/points", Json::array()),
            "test.json: field 'curves[0].points' has no point, at least one is needed");
  EXPECT_EQ(refusal("/curves/0/points/0/time_us", 1),
            "test.json: field 'curves[0].points[0]' must have either time_us or gbps");
  EXPECT_EQ(refusal("/curves/0/units", 8),
            "test.json: field 'curves[0].units' is 8, must leave some of the 8 units to compute");
  EXPECT_EQ(refusal("/curves/0/world_size", 1),
            "test.json: field 'curves[0].world_size' is 1, must be an integer in [2, 16777216]");
  EXPECT_EQ(refusal("/curves/0/bandwith", 1),
            "test.json: unknown field \"curves[0].bandwith\" (known here: collective, world_size, units, "
            "dtype, points, "
            "source)");
  EXPECT_EQ(refusal("/gemm/kernels/0/dtype", "f64"),
            "test.json: field 'gemm.kernels[0].dtype' is \"f64\", must be one of f32, bf16, f16");
  EXPECT_EQ(refusal("/gemm/kernels/0/ragged", "no"),
            "test.json: field 'gemm.kernels[0].ragged' is \"no\", must be padded or proportional");
  EXPECT_EQ(refusal("/gemm/kernels/0/units_per_tile", 0),
            "test.json: field 'gemm.kernels[0].units_per_tile' is 0, must be an integer in [1, 1048576]");
  EXPECT_EQ(refusal("/gemm/kernels", Json::array()), "test.json: field 'gemm.kernels' has no kernel");
  EXPECT_EQ(refusal("/levels/1/ranks", 6),
            "test.json: field 'levels[1].ranks' is 6, must be a larger multiple of the inner level's 4");
  EXPECT_EQ(refusal("/levels/0/ranks", 0),
            "test.json: field 'levels[1]' follows a level of any size, which must be the last");
  EXPECT_EQ(
      refusal("/provenance/kind", "guessed"),
      "test.json: field 'provenance.kind' is \"guessed\", must be one of measured, published, estimated");
  EXPECT_EQ(refusal("/provenance/libraries", 1),
            "test.json: field 'provenance.libraries' is 1, must be an object of name and version");
  EXPECT_EQ(without("", "schema"), "test.json: field 'schema' is missing");
  EXPECT_EQ(without("/gemm", "launch_us"), "test.json: field 'gemm.launch_us' is missing");
  EXPECT_EQ(without("/levels/0", "source"), "test.json: field 'levels[0].source' is missing");
  Json twice = good();
  twice["gemm"]["kernels"].push_back(twice["gemm"]["kernels"][0]);
  FLASHOVERLAP_EXPECT_THROW(kFile, "'gemm.kernels[1]' describes f32 64x64 a second time",
                            static_cast<void>(parse(twice)));
}

TEST(MachineProfile, UnknownMachinesAreRefusedWithTheKnownOnes) {
  FLASHOVERLAP_EXPECT_THROW(kBadArgument,
                            "machine '4x-rtx' is not known; shipped profiles: 1x-h200-rehearsal-2",
                            static_cast<void>(load_machine_profile("4x-rtx")));
  FLASHOVERLAP_EXPECT_THROW(kFile, "machine profile '/nowhere/x.json' cannot be read",
                            static_cast<void>(load_machine_profile("/nowhere/x.json")));
}

TEST(MachineProfile, MeasuredCurvesWinOverTheTopology) {
  MachineProfile profile = parse(good());
  EXPECT_EQ(profile.curve(TransferKind::kAllReduce, 4, 0, DType::kFloat32), profile.curves[0].curve);
  CommunicationCurve special = profile.curves[0];
  special.dtype = DType::kFloat16;
  special.curve = special.curve.scaled(2);
  profile.curves.push_back(special);
  EXPECT_EQ(profile.curve(TransferKind::kAllReduce, 4, 0, DType::kFloat16), special.curve);
  EXPECT_EQ(profile.curve(TransferKind::kAllReduce, 4, 0, DType::kFloat32), profile.curves[0].curve);
  EXPECT_EQ(profile.communication_unit_choices(TransferKind::kAllReduce, 4), std::vector<std::int64_t>{0});
  EXPECT_EQ(profile.communication_unit_choices(TransferKind::kAllReduce, 2), std::vector<std::int64_t>{0});
}

/// Bytes on the wire are those of LinkModel (in_process.h).
TEST(MachineProfile, OneLevelIsTheLinkModel) {
  MachineProfile profile = parse(good());
  profile.curves.clear();
  profile.levels.resize(1);
  const auto time = [&](TransferKind kind, std::int64_t ranks) {
    return profile.curve(kind, ranks, 0, DType::kFloat32).time_us(1000000);
  };
  EXPECT_NEAR(time(TransferKind::kAllReduce, 4), 2 + 2 * 0.75 * 1e6 / 1e5, 1e-9);
  EXPECT_NEAR(time(TransferKind::kAllReduce, 2), 2 + 2 * 0.5 * 1e6 / 1e5, 1e-9);
  EXPECT_NEAR(time(TransferKind::kReduceScatter, 4), 2 + 0.75 * 1e6 / 1e5, 1e-9);
  EXPECT_NEAR(time(TransferKind::kAllGather, 3), 2 + 2.0 / 3 * 1e6 / 1e5, 1e-9);
  EXPECT_NEAR(time(TransferKind::kAllToAll, 4), 2 + 0.75 * 1e6 / 1e5, 1e-9);
  FLASHOVERLAP_EXPECT_THROW(kBadArgument, "machine 'test' has at most 4 ranks, 5 were asked for",
                            static_cast<void>(time(TransferKind::kAllReduce, 5)));
  FLASHOVERLAP_EXPECT_THROW(kBadArgument, "1 ranks have nothing to communicate",
                            static_cast<void>(time(TransferKind::kAllReduce, 1)));
  profile.levels.clear();
  FLASHOVERLAP_EXPECT_THROW(
      kBadArgument, "neither a topology nor a curve for all-reduce of 4 ranks on 0 units; its curves: none",
      static_cast<void>(time(TransferKind::kAllReduce, 4)));
}

TEST(MachineProfile, TheSlowerLevelAndAllLatenciesCount) {
  MachineProfile profile = parse(good());
  profile.curves.clear();
  // 8 nodes of 4 ranks with 2 ports of 10 GB/s each: a rank's quarter of the buffer goes over half a port.
  const auto time = [&](TransferKind kind) {
    return profile.curve(kind, 32, 0, DType::kFloat32).time_us(1000000);
  };
  EXPECT_NEAR(time(TransferKind::kAllReduce), 2 + 3 * 10 + 2 * 7.0 / 8 * (1e6 / 4) * 2 / 1e4, 1e-9);
  EXPECT_NEAR(time(TransferKind::kAllToAll), 2 + 3 * 10 + (32 - 4) / 32.0 * 1e6 * 2 / 1e4, 1e-9);
}

}  // namespace
}  // namespace flashoverlap
