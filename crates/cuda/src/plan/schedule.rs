//! Which block of threads computes which rows and keys.

use super::launch::{Capacity, Launch};
use super::work_tile::{MERGE_GROUP, NONE, SPLITS_GROUPED, WorkTile};
use flashtile_core::problem::Problem;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

/// Bytes of a tile's partials above which they are merged in groups first: one block of threads reads fewer faster than it waits for
/// other blocks.
const GROUPED_BYTES: usize = 128 << 10;

/// The sizes of a kernel's tile that the schedule depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TileShape {
    /// Query rows of a tile, and keys of a block of keys.
    pub(super) rows: usize,
    pub(super) keys: usize,
    /// Columns of values of a work tile, and the panels into which the values are cut.
    pub(super) value_dim: usize,
    pub(super) panels: usize,
    /// Teams of warps that end a tile each for itself, with counters of their own.
    pub(super) teams: usize,
    /// The fewest blocks of keys for which a split is worth its partial result.
    pub(super) min_split_blocks: usize,
}

/// Rows of a sequence and key/value head, and the keys that they see.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tile {
    sequence: usize,
    kv_head: usize,
    row: usize,
    panel: usize,
    keys: Range<usize>,
    full: Range<usize>,
    /// Rows that it has.
    count: usize,
    rows: SequenceRows,
}

/// Where the rows and keys of a sequence lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SequenceRows {
    batch: usize,
    q_start: usize,
    q_len: usize,
    kv_start: usize,
    kv_len: usize,
    q_offset: i64,
}

impl Tile {
    /// Blocks of keys to compute; 1 where there are none, since the output is to be written.
    pub(super) fn blocks(&self, block_k: usize) -> usize {
        (self.keys.end.div_ceil(block_k)).saturating_sub(self.keys.start / block_k).max(1)
    }

    /// How long a block of threads computes the tile, in the time of a block of keys: its beginning and end take about as long as one.
    fn time(&self, block_k: usize) -> usize {
        self.blocks(block_k) + 1
    }

    /// The work tile of all of its keys: blocks of one key begin and end where the keys do, whatever the kernel's blocks are.
    fn whole(&self) -> WorkTile {
        self.work_tile(0..self.blocks(1), 1)
    }

    /// The work tile of a range of its blocks of keys.
    fn work_tile(&self, blocks: Range<usize>, block_k: usize) -> WorkTile {
        let first = self.keys.start / block_k;
        let begin = ((first + blocks.start) * block_k).max(self.keys.start);
        let end = ((first + blocks.end) * block_k).min(self.keys.end).max(begin);
        WorkTile {
            sequence: self.sequence as u32,
            kv_head: self.kv_head as u32,
            row: self.row as u32,
            panel: self.panel as u32,
            begin: begin as u32,
            end: end as u32,
            full_begin: self.full.start as u32,
            full_end: self.full.end as u32,
            partial: 0,
            first_partial: 0,
            splits: 1,
            counter: 0,
            next: 0,
            batch: self.rows.batch as u32,
            q_start: self.rows.q_start as u32,
            q_len: self.rows.q_len as u32,
            kv_start: self.rows.kv_start as u32,
            kv_len: self.rows.kv_len as u32,
            q_offset: self.rows.q_offset,
        }
    }
}

/// The tiles of some sequences; a head's tiles are neighbours.
pub(super) fn tiles(problem: &Problem, shape: &TileShape, sequences: &[usize], skip: bool) -> Vec<Tile> {
    let gqa_group = problem.dims().gqa_group();
    let (rows, panels) = (shape.rows, shape.panels);
    let mut tiles = Vec::new();
    for &sequence in sequences {
        let s = &problem.sequences()[sequence];
        let all = s.q_len * gqa_group;
        // The rows of a tile see the same keys in every head.
        let of_row = |row: usize| {
            let (first, last) = (row / gqa_group, (row + rows).min(all).div_ceil(gqa_group) - 1);
            let keys = if skip {
                problem.visible_union(s, first..last + 1)
            } else {
                problem.first_visible(s).map_or(0..0, |(_, key)| key..s.kv_len)
            };
            // Both ends of the keys that a row sees grow with its position.
            let mut full = problem.visible(s, last).start..problem.visible(s, first).end;
            if problem.desc().tree {
                full.end = full.end.min(s.kv_len - s.q_len);
            }
            (row, keys, full)
        };
        let place = SequenceRows {
            batch: s.batch,
            q_start: s.q_start,
            q_len: s.q_len,
            kv_start: s.kv_start,
            kv_len: s.kv_len,
            q_offset: s.q_offset,
        };
        let of_head: Vec<_> = (0..all).step_by(rows).map(of_row).collect();
        for kv_head in 0..problem.dims().kv_heads {
            for (row, keys, full) in &of_head {
                tiles.extend((0..panels).map(|panel| Tile {
                    sequence,
                    kv_head,
                    row: *row,
                    panel,
                    keys: keys.clone(),
                    full: full.clone(),
                    count: rows.min(all - row),
                    rows: place,
                }));
            }
        }
    }
    tiles
}

/// Work tiles of each block of threads.
pub(super) struct Assignment {
    blocks: Vec<Vec<WorkTile>>,
    /// Work tiles that any block takes after its own, in this order.
    queue: Vec<WorkTile>,
    splits: usize,
    used: Capacity,
    /// The capacity that another step of the same number of tiles may use.
    reserved: Capacity,
}

impl Assignment {
    const fn none() -> Self {
        let used = Capacity { grid: 0, work_tiles: 0, partials: 0, counters: 0 };
        Self { blocks: Vec::new(), queue: Vec::new(), splits: 1, used, reserved: used }
    }

    /// Tiles as a whole, for `room` blocks of threads that the device holds at a time, in the order of [`in_sections`]. Each goes to the
    /// block that is done first, and has at most `max_work_tiles`.
    pub(super) fn whole(
        tiles: Vec<Tile>,
        block_k: usize,
        section: Section,
        room: usize,
        max_work_tiles: usize,
    ) -> Self {
        let rounds = tiles.len().div_ceil(room.saturating_mul(max_work_tiles));
        let count = (room * rounds).min(tiles.len());
        let mut blocks: Vec<Vec<WorkTile>> = vec![Vec::new(); count];
        // The time of each block of threads so far; among equal ones the first block is taken.
        let mut done: BinaryHeap<Reverse<(usize, usize)>> = (0..count).map(|n| Reverse((0, n))).collect();
        for tile in in_sections(&tiles, section, 0) {
            let Some(Reverse((work, block))) = done.pop() else { break };
            blocks[block].push(tile.whole());
            // A block of threads with as many work tiles as it may have gets no more: the others have room for the rest.
            if blocks[block].len() < max_work_tiles {
                done.push(Reverse((work + tile.time(block_k), block)));
            }
        }
        Self { blocks, ..Self::none() }
    }

    /// Tiles in the order of [`in_sections`]: the first for each of `room` blocks of threads, the others for whichever block is done, while
    /// the kernel runs. If it `cuts`, the last are cut where others would wait long for them.
    pub(super) fn queue(
        tiles: Vec<Tile>,
        shape: &TileShape,
        section: Section,
        room: usize,
        cuts: bool,
    ) -> Self {
        let mut tiles = in_sections(&tiles, section, 2 * room);
        let mut assignment = Self::none();
        // The counter of the queue.
        assignment.used.counters = 1;
        let rest = if cuts { unbalanced(&tiles, shape, room) } else { 0 };
        let rest = tiles.split_off(tiles.len() - rest);
        let mut work_tiles = tiles.into_iter().map(|tile| tile.whole());
        assignment.blocks = work_tiles.by_ref().take(room).map(|first| vec![first]).collect();
        assignment.queue = work_tiles.collect();
        if !rest.is_empty() {
            let mut cut = assignment.cut(&rest, shape, room).concat();
            cut.sort_by_key(|work_tile| Reverse(work_tile.end - work_tile.begin));
            assignment.queue.append(&mut cut);
        }
        assignment
    }

    /// Tiles cut into `splits` splits of nearly equal length, with a block of threads for each split: where the caller has chosen the
    /// number of splits, or tiles of a head are better cut at the same keys ([`aligned_splits`]).
    pub(super) fn even(tiles: Vec<Tile>, shape: &TileShape, splits: usize) -> Self {
        let block_k = shape.keys;
        let mut assignment = Self::none();
        for tile in tiles {
            let blocks = tile.blocks(block_k);
            let splits = splits.min(blocks);
            let cut = |n: usize| blocks * n / splits;
            let splits = (0..splits).map(|n| tile.work_tile(cut(n)..cut(n + 1), block_k)).collect();
            for work_tile in assignment.with_partials(splits, tile.count * shape.value_dim * 4) {
                assignment.blocks.push(vec![work_tile]);
            }
        }
        assignment
    }

    /// Splits for at most `room` blocks of threads (as many as the device holds at a time) that end at about the same time: equal splits of
    /// each tile ([`Assignment::even`]), or else the blocks of keys of all tiles end to end, cut into equal ranges ([`Assignment::cut`]). The
    /// beginning and end of a work tile take about as long as a block of keys.
    pub(super) fn equal(tiles: Vec<Tile>, shape: &TileShape, room: usize) -> Self {
        let room = room.max(1);
        // Each boundary between blocks of threads adds a work tile, and cuts one tile.
        let work_tiles = tiles.len() + room;
        // A tile in groups has more than two of them: there are fewer than half as many groups as blocks of threads.
        let reserved =
            Capacity { grid: room, work_tiles, partials: 2 * room + room / 2, counters: room + room / 2 };
        if let Some(splits) = aligned_splits(&tiles, shape, room) {
            return Self { reserved, ..Self::even(tiles, shape, splits) };
        }
        let mut assignment = Self { reserved, ..Self::none() };
        assignment.blocks = assignment.cut(&tiles, shape, room);
        assignment
    }

    /// The work tiles of each of at most `room` blocks of threads, by the smallest time of a block with which [`cut`] needs no more blocks than
    /// that. Tiles keep their order, so that a block has the end of one tile, whole ones, and the beginning of another.
    fn cut(&mut self, tiles: &[Tile], shape: &TileShape, room: usize) -> Vec<Vec<WorkTile>> {
        let (block_k, min_blocks) = (shape.keys, shape.min_split_blocks);
        let total: usize = tiles.iter().map(|tile| tile.time(block_k)).sum();
        let of_tiles = || tiles.iter().map(|tile| tile.blocks(block_k));
        // Cuts add time that is known once they are made: a few lengths are tried, the smallest first.
        let mut share = total.div_ceil(room).max(min_blocks + 1);
        while cut(of_tiles(), share, min_blocks, |_, _, _| ()) > room {
            share += 1;
        }
        let mut ranges: Vec<Vec<(usize, Range<usize>)>> = vec![Vec::new(); tiles.len()];
        let count =
            cut(of_tiles(), share, min_blocks, |tile, block, range| ranges[tile].push((block, range)));
        let mut blocks = vec![Vec::new(); count];
        for (tile, ranges) in tiles.iter().zip(ranges) {
            let splits = ranges.iter().map(|(_, range)| tile.work_tile(range.clone(), block_k)).collect();
            let splits = self.with_partials(splits, tile.count * shape.value_dim * 4);
            for ((block, _), work_tile) in ranges.iter().zip(splits) {
                blocks[*block].push(work_tile);
            }
        }
        blocks
    }

    /// Gives the splits of one tile their partials, of `bytes` each.
    fn with_partials(&mut self, mut splits: Vec<WorkTile>, bytes: usize) -> Vec<WorkTile> {
        let count = splits.len();
        if count > 1 {
            let grouped = count > 2 * MERGE_GROUP && count * bytes > GROUPED_BYTES;
            let groups = if grouped { count.div_ceil(MERGE_GROUP) } else { 0 };
            for (n, work_tile) in splits.iter_mut().enumerate() {
                work_tile.partial = (self.used.partials + n) as u32;
                work_tile.first_partial = self.used.partials as u32;
                work_tile.splits = count as u32 | if grouped { SPLITS_GROUPED } else { 0 };
                work_tile.counter = self.used.counters as u32;
            }
            self.used.partials += count + groups;
            self.used.counters += 1 + groups;
            self.splits = self.splits.max(count);
        }
        splits
    }

    pub(super) fn launch<K>(self, kernel: K, teams: usize) -> Launch<K> {
        let grid = self.blocks.len();
        let count = self.queue.len() + self.blocks.iter().map(Vec::len).sum::<usize>();
        let is_queue = !self.queue.is_empty();
        let used = Capacity { grid, work_tiles: count, ..self.used };
        let reserved = used.max(self.reserved);
        let capacity = Capacity { counters: teams * reserved.counters, ..reserved };
        let none = WorkTile { sequence: NONE, ..Tile::EMPTY.work_tile(0..0, 1) };
        let mut work_tiles = vec![none; capacity.grid];
        for (block, list) in self.blocks.into_iter().enumerate() {
            let mut entry = block;
            for (n, work_tile) in list.into_iter().enumerate() {
                if n > 0 {
                    work_tiles[entry].next = work_tiles.len() as u32;
                    entry = work_tiles.len();
                    work_tiles.push(work_tile);
                } else {
                    work_tiles[entry] = work_tile;
                }
            }
        }
        work_tiles.extend(self.queue);
        Launch { kernel, work_tiles, is_queue, count, splits: self.splits, max_blocks: 0, capacity }
    }
}

/// Heads whose tiles are computed at a time, as many as reach one of these numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Section {
    /// Keys of all heads, which the second-level cache holds.
    pub(super) keys: usize,
    pub(super) heads: usize,
}

/// Tiles in the order in which they are begun. The heads of a section are neighbours, so that keys are read from the second-level cache;
/// among them the longest come first. The last `tail` tiles or more are one section, whose short tiles fill what the long ones leave at
/// the end.
fn in_sections(tiles: &[Tile], section: Section, tail: usize) -> Vec<Tile> {
    let tail = tiles.len().saturating_sub(tail);
    let mut sections: Vec<(usize, Tile)> = Vec::with_capacity(tiles.len());
    let (mut number, mut keys, mut heads) = (0, 0usize, 0);
    for head in tiles.chunk_by(|a, b| (a.sequence, a.kv_head) == (b.sequence, b.kv_head)) {
        if (keys >= section.keys || heads >= section.heads) && sections.len() <= tail {
            (number, keys, heads) = (number + 1, 0, 0);
        }
        let begin = head.iter().map(|tile| tile.keys.start).min().unwrap_or(0);
        let end = head.iter().map(|tile| tile.keys.end).max().unwrap_or(0);
        keys += end.saturating_sub(begin).max(1);
        heads += 1;
        sections.extend(head.iter().cloned().map(|tile| (number, tile)));
    }
    sections.sort_by_key(|(number, tile)| (*number, Reverse(tile.keys.len())));
    sections.into_iter().map(|(_, tile)| tile).collect()
}

/// How many of the last `tiles` are better cut: the rest of a last round for `room` blocks of threads, if most of those would wait long for it
/// otherwise. Under a causal mask the last tiles are short and fill what longer ones leave: then usually none.
fn unbalanced(tiles: &[Tile], shape: &TileShape, room: usize) -> usize {
    if tiles.len() <= room {
        return 0;
    }
    let rest = tiles.len() % room;
    // The cost of cutting tiles and of storing and merging their partials, in blocks of keys. It grows with the bytes of the partials: an estimate
    // without them cut tiles where that made a launch 6 % slower (docs/kernels/hopper.md).
    let cost = 4 + shape.value_dim / 8 * rest / room;
    let (before, last) = tiles.split_at(tiles.len() - rest);
    let time = |tile: &Tile| tile.time(shape.keys);
    let blocks = last.iter().map(|tile| tile.blocks(shape.keys)).sum::<usize>();
    let cut = blocks.div_ceil(room).max(shape.min_split_blocks) + 1 + cost;
    // Uncut, they end at most as long after the others as the longest takes.
    if last.iter().map(time).max().is_none_or(|longest| longest <= cut) {
        return 0;
    }
    let mut ends = Ends::new(room);
    let others_end = before.iter().map(|tile| ends.add(time(tile))).max().unwrap_or(0);
    let last_end = last.iter().map(|tile| ends.add(time(tile))).max().unwrap_or(0);
    if last_end > others_end + cut { rest } else { 0 }
}

/// When each block of threads ends, if each tile in turn goes to the one that is done first.
struct Ends(BinaryHeap<Reverse<usize>>);

impl Ends {
    fn new(room: usize) -> Self {
        Self(std::iter::repeat_n(Reverse(0), room).collect())
    }

    /// Adds a tile that takes `time`, and returns when it ends.
    fn add(&mut self, time: usize) -> usize {
        let Some(mut first) = self.0.peek_mut() else { return time };
        first.0 += time;
        first.0
    }
}

/// Splits of every tile where all tiles are better cut into as many. Tiles of one head are cut at about the same keys then, and the blocks of
/// threads that compute them read the same keys at the same time, from the second-level cache. None where no tiles share keys, or where
/// that takes much longer than cuts at any key.
fn aligned_splits(tiles: &[Tile], shape: &TileShape, room: usize) -> Option<usize> {
    let head = |tile: &Tile| (tile.sequence, tile.kv_head);
    if !tiles.windows(2).any(|pair| head(&pair[0]) == head(&pair[1]) && pair[0].row != pair[1].row) {
        return None;
    }
    let splits = room / tiles.len();
    let blocks = || tiles.iter().map(|tile| tile.blocks(shape.keys));
    if splits < 2 || blocks().any(|blocks| blocks < splits * shape.min_split_blocks) {
        return None;
    }
    let aligned = blocks().max()?.div_ceil(splits) + 1;
    let anywhere = blocks().map(|blocks| blocks + 1).sum::<usize>().div_ceil(room) + 1;
    (aligned * 16 <= anywhere * 17).then_some(splits)
}

/// Cuts tiles, given by their blocks of keys, into splits for blocks of threads that each have time for `share` blocks of keys; a split
/// takes the time of one more than it has. Reports tile, block of threads and blocks of keys of each split. A split that a cut leaves has at
/// least `min_blocks`, except the last of a tile. Returns the number of blocks of threads.
fn cut(
    tiles: impl Iterator<Item = usize>,
    share: usize,
    min_blocks: usize,
    mut report: impl FnMut(usize, usize, Range<usize>),
) -> usize {
    let (mut count, mut left) = (0, 0);
    for (tile, blocks) in tiles.enumerate() {
        let mut done = 0;
        while done < blocks {
            if left <= min_blocks.min(blocks - done) {
                count += 1;
                left = share;
            }
            let next = blocks.min(done + left - 1);
            report(tile, count - 1, done..next);
            left -= next - done + 1;
            done = next;
        }
    }
    count
}

impl Tile {
    const EMPTY: Self = Self {
        sequence: 0,
        kv_head: 0,
        row: 0,
        panel: 0,
        keys: 0..0,
        full: 0..0,
        count: 0,
        rows: SequenceRows { batch: 0, q_start: 0, q_len: 0, kv_start: 0, kv_len: 0, q_offset: 0 },
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(keys: usize) -> Section {
        Section { keys, heads: usize::MAX }
    }

    fn tile(sequence: usize, keys: Range<usize>) -> Tile {
        Tile { sequence, full: keys.clone(), keys, count: 16, ..Tile::EMPTY }
    }

    impl Assignment {
        fn work_tiles(&self) -> impl Iterator<Item = &WorkTile> {
            self.blocks.iter().flatten().chain(&self.queue)
        }
    }

    const SHAPE: TileShape =
        TileShape { rows: 16, keys: 64, value_dim: 128, panels: 1, teams: 1, min_split_blocks: 1 };

    /// Every key of every tile is in exactly one work tile, and the partials of a tile's splits are neighbours in key order.
    fn check(assignment: &Assignment, tiles: &[Tile]) {
        for tile in tiles {
            let work_tiles = || assignment.work_tiles().filter(|i| i.sequence == tile.sequence as u32);
            let mut at = tile.keys.start;
            for (n, work_tile) in work_tiles().enumerate() {
                assert_eq!(work_tile.begin as usize, at);
                at = work_tile.end as usize;
                assert_eq!((work_tile.splits & !SPLITS_GROUPED) as usize, work_tiles().count());
                if work_tile.splits > 1 {
                    assert_eq!(work_tile.partial, work_tile.first_partial + n as u32);
                }
            }
            assert_eq!(at, tile.keys.end.max(tile.keys.start));
        }
    }

    #[test]
    fn every_key_is_assigned_once_and_blocks_take_the_same_time() {
        let lens = [1usize, 5000, 64, 65, 0, 777, 12_000];
        let tiles: Vec<Tile> = lens.iter().enumerate().map(|(n, &len)| tile(n, 3.min(len)..len)).collect();
        for room in [1, 2, 7, 100, 264] {
            let assignment = Assignment::equal(tiles.clone(), &SHAPE, room);
            assert!(assignment.blocks.len() <= room && assignment.blocks.iter().all(|b| !b.is_empty()));
            assert_eq!(assignment.reserved.max(assignment.used), assignment.reserved);
            check(&assignment, &tiles);
            let cost = |work_tiles: &Vec<WorkTile>| {
                let of = |i: &WorkTile| (i.end.div_ceil(64) - i.begin / 64).max(1) as usize + 1;
                work_tiles.iter().map(of).sum::<usize>()
            };
            // Cuts add a work tile for each block of threads, and leave room for less than a split.
            let total: usize = tiles.iter().map(|t| t.blocks(64) + 1).sum();
            assert!(assignment.blocks.iter().map(cost).all(|n| n <= total.div_ceil(room) + 2), "{room}");
        }
        // Two tiles of a head are cut at the same keys, unless too many blocks of threads would have no work.
        let rows = |len: usize| [0, 16].map(|row| Tile { row, ..tile(0, 0..len) }).to_vec();
        for (room, len, aligned) in [(9, 4096, true), (11, 6400, true), (3, 4096, false)] {
            let assignment = Assignment::equal(rows(len), &SHAPE, room);
            let cuts = |row| assignment.work_tiles().filter(move |i| i.row == row).map(|i| i.begin);
            assert_eq!(cuts(0).eq(cuts(16)), aligned, "{room} {len}");
            assert!(assignment.blocks.len() <= room && cuts(0).count() > 1);
            assert_eq!(assignment.reserved.max(assignment.used), assignment.reserved);
        }
        for splits in [1, 2, 5, 1000] {
            check(&Assignment::even(tiles.clone(), &SHAPE, splits), &tiles);
        }
        for (room, max_work_tiles) in
            [1, 4, 100].into_iter().flat_map(|room| [1, 3, usize::MAX].map(|max| (room, max)))
        {
            let assignment = Assignment::whole(tiles.clone(), 64, keys(1000), room, max_work_tiles);
            assert!(assignment.blocks.iter().all(|b| (1..=max_work_tiles).contains(&b.len())));
            check(&assignment, &tiles);
            let rounds = tiles.len().div_ceil(room.saturating_mul(max_work_tiles));
            assert_eq!(assignment.blocks.len(), (room * rounds).min(tiles.len()));
        }
        for room in [1, 3, 100] {
            let assignment = Assignment::queue(tiles.clone(), &SHAPE, keys(5000), room, false);
            check(&assignment, &tiles);
            assert_eq!(assignment.blocks.len(), room.min(tiles.len()));
            // The first three heads have 5000 keys together, the last section has 2 * room tiles at least.
            let order: Vec<u32> = assignment.work_tiles().map(|work_tile| work_tile.sequence).collect();
            let expected = if room == 1 { [1, 2, 0, 6, 5, 3, 4] } else { [6, 1, 5, 3, 2, 0, 4] };
            assert_eq!(order, expected);
            let launch = assignment.launch((), 2);
            assert_eq!(launch.queued() as usize, if room < tiles.len() { tiles.len() } else { 0 });
            assert!(launch.work_tiles.iter().all(|work_tile| work_tile.next == 0));
        }
    }

    #[test]
    fn sections_count_the_keys_of_a_head() {
        // Three heads of four tiles that see 100 to 400 keys.
        let tiles: Vec<Tile> =
            (0..12).map(|n| Tile { row: n % 4, ..tile(n / 4, 0..100 * (n % 4 + 1)) }).collect();
        let order = |section| {
            let tiles = in_sections(&tiles, section, 0).into_iter();
            tiles.map(|tile| (tile.sequence, tile.keys.end / 100)).collect::<Vec<_>>()
        };
        let head = |head: usize| [4, 3, 2, 1].map(|len| (head, len)).to_vec();
        let first_two: Vec<_> = [4, 3, 2, 1].into_iter().flat_map(|len| [(0, len), (1, len)]).collect();
        assert_eq!(order(keys(400)), [head(0), head(1), head(2)].concat());
        for section in [keys(500), Section { heads: 2, ..keys(usize::MAX) }] {
            assert_eq!(order(section), [first_two.clone(), head(2)].concat());
        }
    }

    #[test]
    fn a_queue_cuts_tiles_that_would_leave_blocks_without_work() {
        // 14 tiles of 64 blocks for 4 blocks of threads: 2 are cut.
        let tiles: Vec<Tile> = (0..14).map(|n| tile(n, 0..4096)).collect();
        let queue = |cuts| Assignment::queue(tiles.clone(), &SHAPE, keys(1), 4, cuts);
        assert!(queue(false).work_tiles().all(|work_tile| work_tile.splits == 1));
        let assignment = queue(true);
        let (whole, splits): (Vec<&WorkTile>, Vec<&WorkTile>) =
            assignment.work_tiles().partition(|work_tile| work_tile.splits == 1);
        assert_eq!((whole.len(), splits.len()), (12, 4));
        assert!(splits.iter().all(|split| (31 * 64..=33 * 64).contains(&(split.end - split.begin))));
        // The queue has the first counter.
        assert!(splits.iter().all(|split| split.counter > 0));
        assert_eq!(assignment.launch((), 2).capacity.counters, 2 * 3);
        // Tiles of rows that see ever fewer keys: the last ones end while others are computed.
        let causal: Vec<Tile> = (0..14).map(|n| tile(n, 0..64 * (128 - 8 * n))).collect();
        let assignment = Assignment::queue(causal, &SHAPE, keys(usize::MAX), 4, true);
        assert!(assignment.work_tiles().all(|work_tile| work_tile.splits == 1));
        // Two rounds of tiles of 30 blocks, and one tile of `len`: cut for 4 blocks of threads, it takes 3 + 1 and the cost of 4 + 16 / 4.
        for (len, is_cut) in [(11, false), (12, true)] {
            let tiles: Vec<Tile> = (0..9).map(|n| tile(n, 0..64 * if n < 8 { 30 } else { len })).collect();
            let assignment = Assignment::queue(tiles, &SHAPE, keys(1), 4, true);
            assert_eq!(assignment.work_tiles().any(|work_tile| work_tile.splits > 1), is_cut, "{len}");
        }
        // A tile of few blocks is not worth it.
        let short: Vec<Tile> = (0..14).map(|n| tile(n, 0..300)).collect();
        let assignment = Assignment::queue(short, &SHAPE, keys(1), 4, true);
        assert!(assignment.work_tiles().all(|work_tile| work_tile.splits == 1));
    }
}
