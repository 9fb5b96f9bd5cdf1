#include "ops/work_list.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "support/seed.h"

namespace flashoverlap::ops {
namespace {

class WorkListTest : public test::SeededTest {};

TEST_F(WorkListTest, DoesEveryStepOnceAndThoseOfASequenceInOrder) {
  for (int round = 0; round < 30; ++round) {
    cpu::ThreadPool pool(static_cast<int>(pick(1, 4)), "work");
    WorkList work;
    std::vector<std::int64_t> steps(static_cast<std::size_t>(pick(0, 12)));
    std::vector<std::int64_t> done(steps.size(), 0);  // plain: one thread at a time is at a sequence
    for (std::size_t s = 0; s < steps.size(); ++s) {
      steps[s] = pick(0, 20);
      work.add({.num_steps = steps[s], .run = [&done, s](std::int64_t step, WorkScratch& scratch) {
                  scratch.left.assign(7, static_cast<float>(step));
                  EXPECT_EQ(step, done[s]++);
                }});
    }
    const std::int64_t first = pick(0, 30);
    for (std::int64_t i = 0; i < first; ++i) work.do_step(nullptr);
    work.finish(pool);
    EXPECT_EQ(done, steps);
    EXPECT_FALSE(work.do_step(nullptr));
    work.finish(pool);
    EXPECT_EQ(done, steps);
  }
}

TEST(WorkList, AStepWaitsForItsSlicesAndHoldsUpNoOther) {
  WorkList work;
  const std::vector<std::int64_t> slices = {3, 4};
  std::string done;
  work.add(
      {.num_steps = 3,
       .run = [&](std::int64_t step, WorkScratch&) { done += fmt::format("a{}", step); },
       .slices =
           [&](std::int64_t step) { return step == 1 ? std::span(slices) : std::span(slices).first(0); }});
  work.add({.num_steps = 1, .run = [&](std::int64_t, WorkScratch&) { done += "b"; }});
  std::vector<bool> arrived(5, false);
  const SliceArrived has_arrived = [&](std::int64_t slice) {
    return arrived[static_cast<std::size_t>(slice)];
  };
  EXPECT_TRUE(work.do_step(has_arrived));
  EXPECT_TRUE(work.do_step(has_arrived));
  EXPECT_FALSE(work.do_step(has_arrived));
  arrived[4] = true;
  EXPECT_FALSE(work.do_step(has_arrived));
  EXPECT_EQ(done, "a0b");
  arrived[3] = true;
  EXPECT_TRUE(work.do_step(has_arrived));
  EXPECT_TRUE(work.do_step(has_arrived));
  EXPECT_FALSE(work.do_step(has_arrived));
  EXPECT_EQ(done, "a0ba1a2");
}

TEST(WorkList, AnExceptionEndsIt) {
  const auto list_of = [](WorkList& work, std::string& done) {
    work.add({.num_steps = 4, .run = [&](std::int64_t step, WorkScratch&) {
                if (step == 2) throw std::runtime_error("step 2");
                done += fmt::format("a{}", step);
              }});
    work.add({.num_steps = 1, .run = [&](std::int64_t, WorkScratch&) { done += "b"; }});
  };
  std::string done;
  WorkList work;
  list_of(work, done);
  EXPECT_TRUE(work.do_step(nullptr));
  EXPECT_TRUE(work.do_step(nullptr));
  EXPECT_THROW(work.do_step(nullptr), std::runtime_error);
  EXPECT_FALSE(work.do_step(nullptr));
  EXPECT_EQ(done, "a0a1");

  cpu::ThreadPool pool(1, "work");
  WorkList finished;
  list_of(finished, done);
  try {
    finished.finish(pool);
    FAIL() << "nothing was thrown";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "step 2");
  }
  EXPECT_EQ(done, "a0a1a0a1");
}

}  // namespace
}  // namespace flashoverlap::ops
