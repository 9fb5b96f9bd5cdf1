#pragma once

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "flashoverlap/dtype.h"
#include "flashoverlap/error.h"

/// The overlap plan: the one idea of this library.
///
/// Tiles of a GEMM are computed in some order; some tiles wait for input; some sets of tiles, once complete,
/// set off a transfer. A plan says all of this for one rank and one call shape, as plain data without
/// pointers to memory. Builders make plans (plan_builders.h), `verify` checks them, the simulator and the
/// predictor price them, and an executor carries them out without knowing what they are for.
///
/// Words, used as defined here:
///   tile        a rectangle of the GEMM's output D[m,n] = A[m,k] · B[n,k]^T that one unit computes in one go
///   unit        what computes one tile at a time: a CPU thread, or an SM
///   position    index into the schedule; tiles are issued in this order
///   wave        the tiles at positions [w * units, (w + 1) * units): they finish at about the same time
///   wave group  consecutive waves whose results travel together (arXiv 2504.19519, section 3)
///   partition   the number of waves in each group; it sums to the number of waves
///   placement   where the rows of a tile are written: dense, into the packed buffer, so that a group is
///   contiguous restore     the inverse of placement, applied to what has been received slice       a part of
///   the input (or a partial sum) that arrives from another rank gate        a tile that may only start, or
///   finish, after a slice has arrived
///
/// All sizes and offsets are in elements and 64 bits wide.
namespace flashoverlap {

/// A rectangle of the output that is cut into tiles from its own upper left corner. A plain GEMM has one; a
/// reduce-scatter with contiguous rows has one per owner rank, so that no tile straddles two owners; an
/// expert layer one per expert.
struct Problem {
  std::int64_t row_begin = 0;  ///< First row in A and in D.
  std::int64_t rows = 0;       ///< May be 0 (an expert without tokens).
  std::int64_t col_begin = 0;  ///< First column in D: first row in B.
  std::int64_t cols = 0;
  std::int64_t weight = 0;  ///< Which B of a stack of matrices [weights, n, k].
  bool operator==(const Problem&) const = default;
};

/// One tile: the rectangle [row_begin, row_begin + rows) x [col_begin, col_begin + cols) of D, never empty.
struct Tile {
  std::int64_t problem = 0;
  std::int64_t row_begin = 0;
  std::int64_t rows = 0;
  std::int64_t col_begin = 0;
  std::int64_t cols = 0;
  [[nodiscard]] std::int64_t size() const { return rows * cols; }
  bool operator==(const Tile&) const = default;
};

/// The output cut into tiles, numbered problem by problem and row-major inside one problem.
class TileGrid {
 public:
  TileGrid() = default;
  /// Throws Error(kBadArgument) when a tile size is below 1 or a size is negative.
  TileGrid(std::vector<Problem> problems, std::int64_t k, std::int64_t tile_m, std::int64_t tile_n);

  [[nodiscard]] const std::vector<Problem>& problems() const { return problems_; }
  [[nodiscard]] const std::vector<Tile>& tiles() const { return tiles_; }
  [[nodiscard]] const Tile& tile(std::int64_t index) const { return tiles_[static_cast<std::size_t>(index)]; }
  [[nodiscard]] std::int64_t num_tiles() const { return static_cast<std::int64_t>(tiles_.size()); }
  [[nodiscard]] std::int64_t k() const { return k_; }
  [[nodiscard]] std::int64_t tile_m() const { return tile_m_; }
  [[nodiscard]] std::int64_t tile_n() const { return tile_n_; }
  /// Smallest matrix that holds all problems.
  [[nodiscard]] std::int64_t rows() const;
  [[nodiscard]] std::int64_t cols() const;
  bool operator==(const TileGrid&) const = default;

 private:
  std::vector<Problem> problems_;
  std::int64_t k_ = 0;
  std::int64_t tile_m_ = 1;
  std::int64_t tile_n_ = 1;
  std::vector<Tile> tiles_;
};

/// The memory that a plan speaks of. Which addresses they have is the executor's business.
enum class BufferKind {
  kInput,     ///< A, row-major [m, k].
  kWeight,    ///< B, row-major [n, k].
  kPacked,    ///< Tiles of the output in the order in which they travel; collectives that can, work in place
              ///< here.
  kReceived,  ///< What arrives when it cannot arrive in place.
  kOutput,    ///< The caller's output.
};

/// `count` consecutive elements of a buffer.
struct Region {
  BufferKind buffer = BufferKind::kPacked;
  std::int64_t offset = 0;
  std::int64_t count = 0;
  bool operator==(const Region&) const = default;
};

/// Part of the input, or of a partial sum, that comes from another rank.
struct Slice {
  std::int32_t source = 0;  ///< The rank it comes from.
  Region region;            ///< Where it lands.
  bool operator==(const Slice&) const = default;
};

/// Columns [k_begin, k_begin + depth) of A where they do not lie in one matrix with the others: all rows of
/// the product, dense, from `offset` of `buffer` on.
struct InputBlock {
  std::int64_t k_begin = 0;
  std::int64_t depth = 0;                  ///< >= 1.
  BufferKind buffer = BufferKind::kInput;  ///< kInput or kReceived.
  std::int64_t offset = 0;
  bool operator==(const InputBlock&) const = default;
};

enum class GatePoint {
  kStart,   ///< The tile may not read A or B from element `k_begin` of the main loop on before the slice has
            ///< arrived.
  kFinish,  ///< The tile's epilogue adds the received tile at `offset`, so it waits for the slice before
            ///< that.
};

/// Holds one tile until one slice has arrived. A tile may have several.
///
/// Start gates inside the main loop cut it into passes (`OverlapPlan::passes`): the schedule is walked once
/// for each, so that every tile has taken what is there before the first waits for what is not. Partial sums
/// stay in float32 from pass to pass.
///
/// Finish gates add in the order of ranks, as a collective does: in float32, first the received tiles of
/// lower ranks (in the order listed), then this rank's own, rounded to the element type as if it had been
/// received, then those of higher ranks. So the sum has the same bits whatever arrives first, and however it
/// travels.
struct Gate {
  std::int64_t tile = 0;
  std::int64_t slice = 0;
  GatePoint point = GatePoint::kStart;
  std::int64_t k_begin = 0;  ///< kStart only: counted along the main loop.
  std::int64_t offset = 0;   ///< kFinish only: the dense tile to add, in the received buffer.
  bool operator==(const Gate&) const = default;
};

/// Rows [row_begin, row_begin + rows) of a tile (counted inside the tile) are written at `offset` of the
/// packed buffer, one dense row of the tile's width after the other.
struct PlacementSegment {
  std::int64_t row_begin = 0;
  std::int64_t rows = 0;
  std::int64_t offset = 0;
  bool operator==(const PlacementSegment&) const = default;
};

/// The mapping table of arXiv 2504.19519: for each tile its segments. A tile without segments is written
/// straight to its place in the output.
struct Placement {
  std::vector<std::int64_t> first_segment;  ///< Size tiles + 1: tile t has segments [first[t], first[t + 1]).
  std::vector<PlacementSegment> segments;
  [[nodiscard]] std::span<const PlacementSegment> of_tile(std::int64_t tile) const {
    const auto begin = static_cast<std::size_t>(first_segment[static_cast<std::size_t>(tile)]);
    const auto end = static_cast<std::size_t>(first_segment[static_cast<std::size_t>(tile) + 1]);
    return std::span(segments).subspan(begin, end - begin);
  }
  bool operator==(const Placement&) const = default;
};

/// Positions [first_position, first_position + num_tiles) of the schedule. Complete, and so ready to travel,
/// when as many tiles have been counted. May be empty: then it is ready at once.
struct WaveGroup {
  std::int64_t first_position = 0;
  std::int64_t num_tiles = 0;
  bool operator==(const WaveGroup&) const = default;
};

enum class TransferKind {
  kAllReduce,      ///< source and destination are the same region: in place.
  kReduceScatter,  ///< destination is this rank's chunk of source, in place. send_counts: chunk sizes, empty
                   ///< = equal.
  kAllGather,  ///< source is this rank's chunk of destination, in place. receive_counts: chunk sizes, empty =
               ///< equal.
  kAllToAll,   ///< send_counts and receive_counts: per rank, chunks in rank order.
  kSend,       ///< to `peer`; matches its kReceive.
  kReceive,    ///< from `peer`.
  kPut,        ///< written into the peer's `destination`, then the peer's `slice` is marked as arrived.
};

enum class TriggerKind { kStart, kGroup, kSlice };

/// What sets a transfer off: the start of the call, a complete group, or a slice that has arrived.
struct Trigger {
  TriggerKind kind = TriggerKind::kStart;
  std::int64_t index = 0;
  bool operator==(const Trigger&) const = default;
};

/// One communication call. Transfers of one channel are issued in the order in which they are listed.
struct Transfer {
  TransferKind kind = TransferKind::kAllReduce;
  Trigger trigger;
  std::int32_t channel = 0;
  std::int32_t peer = -1;  ///< kSend, kReceive and kPut only.
  Region source;           ///< count 0 where nothing is sent.
  Region destination;      ///< count 0 where nothing is received here.
  std::vector<std::int64_t> send_counts;
  std::vector<std::int64_t> receive_counts;
  std::int64_t slice =
      -1;  ///< The slice that has arrived once this is done, here (kPut: at the peer); -1: none.
  bool operator==(const Transfer&) const = default;
};

/// Element (row_begin + i, col_begin + j) of the output, with the band's row_begin, is at offset + i * cols +
/// j.
struct RestorePiece {
  std::int64_t col_begin = 0;
  std::int64_t cols = 0;
  std::int64_t offset = 0;
  bool operator==(const RestorePiece&) const = default;
};

/// Rows of the output that consist of the same pieces, which lie side by side and cover all columns.
struct RestoreBand {
  std::int64_t row_begin = 0;
  std::int64_t rows = 0;
  std::int64_t first_piece = 0;
  std::int64_t num_pieces = 0;
  bool operator==(const RestoreBand&) const = default;
};

/// Where each received element belongs, by output row, so that one pass over memory can restore and apply a
/// row-wise epilogue. Bands cover in order the rows of the output that are not in their place already.
struct Restore {
  BufferKind source = BufferKind::kPacked;
  std::vector<RestoreBand> bands;
  std::vector<RestorePiece> pieces;
  [[nodiscard]] std::span<const RestorePiece> of_band(const RestoreBand& band) const {
    return std::span(pieces).subspan(static_cast<std::size_t>(band.first_piece),
                                     static_cast<std::size_t>(band.num_pieces));
  }
  bool operator==(const Restore&) const = default;
};

/// Units (CPU threads or SMs) that the plan assumes.
struct Resources {
  std::int64_t compute_units = 1;
  std::int64_t communication_units = 0;  ///< 0 where communication takes no unit from computation.
  bool operator==(const Resources&) const = default;
};

/// The plan of one rank for one call shape. See the head of this file.
struct OverlapPlan {
  std::string operation;  ///< "gemm-all-reduce", …
  std::int32_t rank = 0;
  std::int32_t world_size = 1;
  DType dtype = DType::kFloat32;
  TileGrid grid;
  std::vector<std::int64_t> schedule;  ///< Tile at each position.
  std::vector<Gate> gates;             ///< Sorted by tile.
  Placement placement;
  std::vector<WaveGroup> groups;
  std::vector<Slice> slices;
  std::vector<Transfer> transfers;
  Restore restore;
  Resources resources;
  /// Parts of A in the order in which the main loop goes through them, each column in one. Empty: A is one
  /// matrix, in the input buffer, and the main loop goes through it from left to right.
  std::vector<InputBlock> input_blocks;
  std::int64_t input_rows = 0;  ///< With input blocks: what the input buffer holds, [input_rows, input_cols].
  std::int64_t input_cols = 0;
  std::int64_t packed_size = 0;
  std::int64_t received_size = 0;
  std::int64_t output_rows = 0;
  std::int64_t output_cols = 0;
  /// Where the output lies in the product: a tile without segments is written to the output at its place in
  /// the product plus these. So a rank that keeps some rows of the product, or receives others around its
  /// own, needs no copy of them.
  std::int64_t output_row_shift = 0;
  std::int64_t output_col_shift = 0;
  /// The most messages (kSend) that any rank sends to one other, equal on all ranks: this rank may have
  /// fewer, but where messages are carried out in steps that all ranks make together, it must make as many.
  /// 0: there are none, or the plan does not say.
  std::int64_t messages_per_pair = 0;
  /// Hash of everything on which the ranks must agree (operation, shape, type, tile, partition, routing, …),
  /// equal on all ranks of a matching call although their plans differ. Compared before the first call of a
  /// shape.
  std::uint64_t agreement = 0;

  [[nodiscard]] std::int64_t num_waves() const;
  /// Wave of a schedule position.
  [[nodiscard]] std::int64_t wave_of(std::int64_t position) const {
    return position / resources.compute_units;
  }
  /// Group of a schedule position.
  [[nodiscard]] std::int64_t group_of(std::int64_t position) const;
  /// Where each pass over the schedule begins in the main loop: at 0, and wherever a start gate does inside.
  [[nodiscard]] std::vector<std::int64_t> passes() const;
  /// Waves of each group: the partition.
  [[nodiscard]] std::vector<std::int64_t> partition() const;
  bool operator==(const OverlapPlan&) const = default;
};

/// Checks everything that one rank's plan can break: every tile scheduled once and in one group; placement a
/// bijection onto the packed buffer; each group's data contiguous and sent by a transfer after that group;
/// gates, slices, regions and counts in range; restore covers the output once and reads only what has been
/// received. O(plan). The reason names the tile, group, transfer and numbers.
Verdict verify(const OverlapPlan& plan);

/// Checks all ranks' plans together (plans[r] is rank r's), each alone first: same agreement; transfers match
/// pairwise in order, kind and size; every awaited slice is sent exactly once; gates and transfers cannot
/// deadlock (found by running the plans symbolically, one tile at a time). The reason names ranks, transfers
/// and what each waits for.
Verdict verify(std::span<const OverlapPlan> plans);

/// Multi-line text: header, a tile map with each tile's wave and group (elided beyond a page), groups,
/// transfers.
std::string to_text(const OverlapPlan& plan);

/// One JSON object; schema in docs/plan-format.md.
std::string to_json(const OverlapPlan& plan);

/// Reads what `to_json` wrote. Throws Error(kBadArgument) naming the field that is missing, of the wrong type
/// or in conflict with another; the plan is verified before it is returned.
OverlapPlan plan_from_json(std::string_view json);

[[nodiscard]] std::string_view name_of(TransferKind kind);  ///< "all-reduce", …
[[nodiscard]] std::string_view name_of(
    BufferKind kind);  ///< "input", "weight", "packed", "received", "output"

}  // namespace flashoverlap
