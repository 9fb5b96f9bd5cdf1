#include "ops/tuned_choice.h"

#include <nlohmann/json.hpp>
#include <string>

#include "ops/agree.h"
#include "ops/choose.h"

namespace flashoverlap::ops {
namespace {

using Json = nlohmann::json;

}  // namespace

OpenCall open_call(const Context& context, const PlanOptions& options, const PlanRecipe& recipe) {
  PlanOptions chosen = options;
  (void)take_suggestion(context.executor(), product_of(chosen), chosen);
  choose_tile(chosen);
  const bool on_gpu = has_suggestion(context, options);
  OpenCall call{.operation = std::string(recipe.operation),
                .variant = recipe.variant,
                .collective = recipe.collective,
                .options = options,
                .default_tile = {chosen.tile_m, chosen.tile_n, chosen.swizzle},
                .waves = recipe.waves,
                .build = recipe.build,
                .tiles_of_executor = on_gpu,
                .min_group_bytes = on_gpu ? kGpuGroupBytes : 0};
  call.options.resources = chosen.resources;
  return call;
}

void take_tuned(Context& context, PlanOptions& options, const PlanRecipe& recipe) {
  if (context.tuner() == nullptr || !options.partition.empty()) return;
  Communicator& communicator = context.communicator();
  const std::string operation = with_shape(recipe.operation, options.m, options.n, options.k);
  const std::vector<std::string> all = agree(communicator, operation, [&]() -> Ticket {
    Ticket ticket{.agreement = 0, .description = "choice of tile and partition", .payload = {}};
    if (communicator.rank() != 0) return ticket;
    const TunedCall tuned = context.tuner()->choose(open_call(context, options, recipe));
    ticket.payload = Json{{"tile_m", tuned.tile.tile_m},
                          {"tile_n", tuned.tile.tile_n},
                          {"swizzle", tuned.tile.swizzle},
                          {"partition", tuned.partition}}
                         .dump();
    return ticket;
  });
  const Json decision = Json::parse(all[0]);
  options.tile_m = decision["tile_m"];
  options.tile_n = decision["tile_n"];
  options.swizzle = decision["swizzle"];
  options.partition = decision["partition"].get<std::vector<std::int64_t>>();
}

}  // namespace flashoverlap::ops
