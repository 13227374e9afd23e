// The work of a unit, and the order in which units add to a tile of d_q.
//
// A unit is UNIT_BLOCKS blocks of threads, each with BLOCK_N keys of one key/value head, and is launched as a cluster where these are two. Units are
// launched in the order of their list. A unit takes its tiles of BLOCK_M query rows from the last to the first. Units add to a tile in the order of
// their keys, and the units of a head are launched in that order: a unit waits for units that were launched before it, which need nothing of it.

constexpr u32 UNIT_KEYS = UNIT_BLOCKS * BLOCK_N;

// A unit and its sequence.
struct Work {
    BackwardUnit unit;
    BackwardSequence sequence;
    // The steps of the unit.
    u32 steps;

    DEVICE explicit Work(const BackwardParams& p) {
        unit = ((const BackwardUnit*)p.units)[blockIdx.x / UNIT_BLOCKS];
        sequence = ((const BackwardSequence*)p.sequences)[unit.sequence];
        steps = (unit.end_tile - unit.first_tile) * p.group;
    }

    // The first key of a block of the unit.
    DEVICE u32 first_key(u32 rank) const { return unit.block * UNIT_KEYS + rank * BLOCK_N; }
};

// A step: a tile of one query head of the group. All heads of a tile, then the next tile, so that units stay together where units have
// different tiles; otherwise head by head, for which the second-level cache has room.
struct Step {
    u32 tile, head = 0;

    DEVICE explicit Step(const Work& work) : tile(work.unit.end_tile - 1) {}

    DEVICE void advance(const BackwardParams& p, const Work& work) {
        if (p.heads_inner) {
            if (++head == p.group) head = 0, tile--;
        } else if (tile-- == work.unit.first_tile) {
            tile = work.unit.end_tile - 1, head++;
        }
    }

    // The query head.
    DEVICE u32 query_head(const BackwardParams& p, const Work& work) const { return work.unit.kv_head * p.group + head; }

    // The number of the tile among the tiles of all heads and sequences.
    DEVICE u64 index(const BackwardParams& p, const Work& work) const { return tile_index(p, work.sequence, query_head(p, work), tile); }
};

// The place of a unit among those that add to a tile.
struct Turn {
    u32 place, last;

    DEVICE Turn(const BackwardParams& p, const Work& work, const Step& at) {
        const BackwardTileUnits of_tile = ((const BackwardTileUnits*)p.tile_units)[work.sequence.tiles_before + at.tile];
        place = work.unit.block - of_tile.first, last = of_tile.count - 1;
    }

    DEVICE bool is_last() const { return place == last; }
};

// Waits until a tile has all sums of the units before. Spins without ordering, and orders once: a fence of the whole device there costs 2 % of
// the kernel for Hopper.
DEVICE void wait_turn(const u32* turn, u32 place) {
    while (load_relaxed(turn) != place) {}
    load_acquire(turn);
}
