//! Reads, products and barriers of the portable kernels, counted on the simulator: the numbers of
//! `docs/kernels/metal.md`.

use crate::natives;
use flashtile::{
    Dims, Dtype, Inputs, Outputs, PlanOptions, Problem, ProblemDesc, QOffset, TensorView, TensorViewMut,
    Visibility,
};
use flashtile_gpu::engine::PortableEngine;
use flashtile_gpu::facts::GpuFacts;
use flashtile_gpu::machines::{M1, M3_MAX, M5};
use flashtile_gpu::plan::Plan;
use flashtile_gpu::session::Session;
use flashtile_gpu::tile::{PortableTile, Tiling};
use flashtile_kernel::simulator::{BufferReport, Fault, Memory, Report, Simulator};
use flashtile_kernel::{Device, HostAccess, Launch, Limits, ScalarType, f16};
use std::sync::Mutex;

/// A simulator that keeps the counts of its first launch, by `decode` or `prefill`.
#[derive(Default)]
struct Counting {
    simulator: Simulator,
    first: Mutex<Option<(Report, Vec<BufferReport>)>>,
}

impl Device for Counting {
    type Memory = Memory;
    type Error = Fault;

    fn limits(&self) -> Limits {
        self.simulator.limits()
    }

    fn launch(&self, launch: Launch<'_, Memory>) -> Result<(), Fault> {
        self.simulator.launch(launch)?;
        let mut first = self.first.lock().unwrap();
        first.get_or_insert_with(|| (self.simulator.report(), self.simulator.buffer_reports()));
        Ok(())
    }
}

impl HostAccess for Counting {
    fn zeroed(&self, element: ScalarType, len: usize) -> Result<Memory, Fault> {
        self.simulator.zeroed(element, len)
    }

    fn uninit(&self, element: ScalarType, len: usize) -> Result<Memory, Fault> {
        self.simulator.uninit(element, len)
    }

    fn write(&self, memory: &mut Memory, at: usize, bytes: &[u8]) -> Result<(), Fault> {
        self.simulator.write(memory, at, bytes)
    }

    fn read(&self, memory: &Memory, at: usize, bytes: &mut [u8]) -> Result<(), Fault> {
        self.simulator.read(memory, at, bytes)
    }
}

/// Counts of the first launch.
struct Counts {
    report: Report,
    /// Bytes of keys and of values that are read.
    kv: [u64; 2],
}

fn dims(queries: usize, group: usize, keys: usize, dim: usize) -> Dims {
    Dims {
        batch: 1,
        q_heads: group,
        kv_heads: 1,
        q_len: queries,
        kv_len: keys,
        head_dim: dim,
        value_dim: dim,
    }
}

fn no_native(_: &Problem) -> String {
    "there is no native code of the tile".to_owned()
}

/// Numbers from -1 to 1 that repeat after 251.
fn numbers(len: usize) -> Vec<f16> {
    (0..len).map(|n| f16::from_f32((n * 83 % 251) as f32 / 125.0 - 1.0)).collect()
}

/// Counts of f16 attention over one key/value head, with a tile.
fn count(desc: &ProblemDesc, tiling: impl Into<Tiling>) -> Counts {
    let device = Counting { simulator: Simulator::new().stack_bytes(1 << 20), first: Mutex::default() };
    let mut session =
        Session::new(device, PortableEngine::with_tiling(tiling).with_native(natives::find, no_native));
    let (dims, len) = (desc.dims, |shape: [usize; 4]| shape.into_iter().product());
    let (q, k, v) =
        (numbers(len(dims.q_shape())), numbers(len(dims.k_shape())), numbers(len(dims.v_shape())));
    let mut out = vec![f16::from_f32(0.0); len(dims.out_shape())];
    let inputs = Inputs::new(
        TensorView::bhsd(&q, dims.q_shape()).unwrap(),
        TensorView::bhsd(&k, dims.k_shape()).unwrap(),
        TensorView::bhsd(&v, dims.v_shape()).unwrap(),
    );
    let mut outputs = Outputs::new(TensorViewMut::bhsd(&mut out, dims.out_shape()).unwrap());
    session.compute(desc, &inputs, &mut outputs).unwrap();
    let (report, buffers) = session.device().first.lock().unwrap().take().unwrap();
    let kv = ["k", "v"].map(|name| buffers.iter().find(|buffer| buffer.name == name).unwrap());
    for buffer in kv {
        let all = 2 * dims.kv_len * dims.head_dim;
        assert_eq!(buffer.distinct_read, all as u64, "every {} is read", buffer.name);
    }
    Counts { report, kv: kv.map(|buffer| buffer.read) }
}

/// Counts of a tile of rows and a block of keys.
#[derive(Debug, PartialEq)]
struct PerBlock {
    /// Bytes of keys and values.
    device: u64,
    /// Products of 8x8 matrices, and the matrices loaded for them.
    matrices: [u64; 2],
    /// Bytes of threadgroup memory read and written.
    shared: [u64; 2],
    barriers: u64,
    exchanges: u64,
    exponentials: u64,
}

/// Counts of one tile of rows and a block of `keys` keys: a fourth of what four more blocks add.
fn per_block(dim: usize, tile: PortableTile, keys: usize) -> PerBlock {
    let of = |blocks| count(&ProblemDesc::new(dims(tile.rows(), 1, keys * blocks, dim), Dtype::F16), tile);
    let (few, many) = (of(2), of(6));
    let each = |of: fn(&Counts) -> u64| {
        let more = of(&many) - of(&few);
        assert_eq!(more % 4, 0, "blocks are alike");
        more / 4
    };
    PerBlock {
        device: each(|counts| counts.kv[0] + counts.kv[1]),
        matrices: [each(|counts| counts.report.matrix_products), each(|counts| counts.report.matrix_loads)],
        shared: [each(|counts| counts.report.shared_read), each(|counts| counts.report.shared_written)],
        barriers: each(|counts| counts.report.barriers),
        exchanges: each(|counts| counts.report.exchanges),
        exponentials: each(|counts| counts.report.exponentials),
    }
}

/// A tile of prefill for one threadgroup a core.
fn prefill(rows: usize, keys: usize, simds: usize, team: usize) -> PortableTile {
    PortableTile::prefill(rows, keys, simds, 1).with_team(team)
}

/// A causal problem of 32 query heads on 8 key/value heads, whose rows end where the keys do.
fn causal(queries: usize, keys: usize, dim: usize) -> Problem {
    let all = Dims { q_heads: 32, kv_heads: 8, ..dims(queries, 1, keys, dim) };
    let mut desc = ProblemDesc::new(all, Dtype::F16);
    (desc.visibility, desc.q_offset) = (Visibility::causal(), Some(QOffset::BottomRight));
    desc.validate().unwrap()
}

fn plan(problem: &Problem, facts: &GpuFacts) -> Plan {
    Plan::new(problem, facts, PlanOptions::default(), None).unwrap()
}

/// The properties that all plans for a tile share; the number of threadgroups a core holds is not one of
/// them.
fn shape(tile: &PortableTile) -> (usize, usize, usize, bool) {
    (tile.rows(), tile.keys(), tile.simds(), tile.is_prefill())
}

#[test]
fn prefill_takes_for_a_block_what_the_table_says() {
    let of = |matrices, shared, barriers, exchanges, exponentials| PerBlock {
        device: 16_384,
        matrices,
        shared,
        barriers,
        exchanges,
        exponentials,
    };
    let long = of([1024, 512], [98_304, 40_960], 4, 8, 2048);
    let rows = [
        (64, prefill(64, 64, 4, 1), 20_048, of([1024, 512], [65_536, 16_384], 2, 4, 4096)),
        (128, prefill(128, 32, 8, 1), 22_640, of([2048, 1024], [131_072, 16_384], 2, 8, 4096)),
        (256, prefill(64, 16, 8, 2), 26_224, of([1024, 512], [81_920, 24_576], 3, 8, 2048)),
        (512, prefill(32, 16, 8, 4).with_one_block(), 25_952, PerBlock { device: 32_768, ..long }),
    ];
    for (dim, tile, shared_bytes, expected) in rows {
        let plan = plan(&causal(4096, 4096, dim), &M1);
        assert_eq!(shape(plan.tile()), shape(&tile), "{dim}: {plan}");
        assert_eq!(plan.launches().instances()[0].shared_bytes(), shared_bytes, "{dim}");
        assert_eq!(per_block(dim, tile, tile.keys()), expected, "{dim}");
    }
    // Of few rows.
    let halves = [
        (prefill(64, 32, 4, 1), of([1024, 512], [65_536, 16_384], 2, 4, 2048)),
        (prefill(32, 32, 4, 2), of([512, 256], [49_152, 24_576], 3, 4, 2048)),
    ];
    for (tile, expected) in halves {
        assert_eq!(per_block(128, tile, 32), expected, "{tile:?}");
    }
}

#[test]
fn decode_takes_for_a_step_what_the_table_says() {
    for dim in [64, 128, 256, 512] {
        let tile = PortableTile::new(8, 16, 4, 1);
        let plan = plan(&causal(1, 32_768, dim), &M1);
        assert_eq!(shape(plan.tile()), shape(&tile), "{dim}: {plan}");
        let step = per_block(dim, tile, 64);
        let all = dim as u64;
        assert_eq!(step.device, 2 * 64 * 2 * all, "{dim}");
        assert_eq!((step.matrices, step.shared), ([2 * all, 0], [0, 0]), "{dim}");
        assert_eq!((step.barriers, step.exchanges, step.exponentials), (0, 4, 8 * 64), "{dim}");
    }
}

/// Blocks above the diagonal are skipped: 16 positions of 4 query heads a tile, blocks of 32 keys.
#[test]
fn causal_prefill_takes_the_blocks_below_the_diagonal() {
    let tile = prefill(64, 32, 4, 1);
    let mut desc = ProblemDesc::new(dims(128, 4, 128, 128), Dtype::F16);
    let full = count(&desc, tile).report.matrix_products;
    (desc.visibility, desc.q_offset) = (Visibility::causal(), Some(QOffset::TopLeft));
    let half = count(&desc, tile).report.matrix_products;
    let blocks: usize = (1..=8usize).map(|tiles| (16 * tiles).div_ceil(32)).sum();
    assert_eq!((full, half, blocks), (8 * 4 * 1024, 20 * 1024, 20));
}

/// Bytes of keys and of values that the threadgroups of one key/value head read, of rows of `dim` elements: every SIMD group of decode
/// requests one tile more than it has, and every threadgroup of prefill one block of keys.
fn kv_bytes(tile: &PortableTile, splits: usize, [rows, keys, dim]: [usize; 3]) -> [usize; 2] {
    let block = if tile.is_prefill() { tile.keys() } else { tile.keys() / tile.simds() };
    let all = keys.div_ceil(block);
    let loads = if tile.is_prefill() {
        let of_split = all.div_ceil(splits);
        let blocks = (0..splits).map(|split| all.saturating_sub(split * of_split).min(of_split));
        let blocks: Vec<usize> = blocks.filter(|&count| count > 0).collect();
        let sum = blocks.iter().sum::<usize>();
        [sum + blocks.len(), sum]
    } else {
        let simds = tile.simds();
        let of_split = all.div_ceil(splits * simds) * simds;
        let of_simd = |split: usize, simd: usize| {
            let end = ((split + 1) * of_split).min(all);
            end.saturating_sub(split * of_split + simd).div_ceil(simds)
        };
        let tiles = (0..splits).flat_map(|split| (0..simds).map(move |simd| of_simd(split, simd)));
        [tiles.filter(|&count| count > 0).map(|count| count + 1).sum(); 2]
    };
    loads.map(|count| rows.div_ceil(tile.rows()) * count * block * dim * 2)
}

/// Keys and values are read once, up to 5 % more, for all query rows of a key/value head, whatever their number: 1 to 32 queries of four
/// heads are 4 to 128 rows. More rows have several tiles, each of which reads them: their products take longer than memory.
#[test]
fn few_rows_and_many_read_keys_once() {
    let keys = 32_768;
    for (name, facts) in [("m1", M1), ("m3-max", M3_MAX), ("m5", M5)] {
        for queries in 1..=48 {
            let plan = plan(&causal(queries, keys, 128), &facts);
            let read: usize = kv_bytes(plan.tile(), plan.splits(), [4 * queries, keys, 128]).iter().sum();
            let times = read as f64 / (2 * keys * 128 * 2) as f64;
            let tiles = if queries <= 32 { 1 } else { (4 * queries).div_ceil(plan.tile().rows()) };
            assert!(tiles <= 3 && plan.tile().rows() >= 64 * (tiles - 1).min(1), "{name}: {plan}");
            let limit = 1.05 * tiles as f64;
            assert!(times <= limit, "{name}: {queries} queries read keys and values {times} times by {plan}");
        }
    }
}

/// The simulator counts the bytes that the test above computes, for every tile that its plans have.
#[test]
fn bytes_of_few_rows_are_the_counted_ones() {
    let tiles = [
        (PortableTile::new(8, 16, 4, 1), 8, 3),
        (PortableTile::new(8, 16, 8, 1), 4, 2),
        (PortableTile::new(16, 16, 4, 1), 16, 3),
        (PortableTile::new(16, 16, 8, 1), 12, 2),
        (prefill(32, 32, 4, 2), 24, 1),
        (prefill(32, 32, 4, 2), 32, 3),
        (prefill(64, 32, 4, 1), 48, 2),
        (prefill(128, 32, 8, 1), 72, 2),
    ];
    let known: Vec<_> = tiles.iter().map(|(tile, ..)| shape(tile)).collect();
    for facts in [M1, M3_MAX, M5] {
        for queries in 1..=48 {
            let plan = plan(&causal(queries, 32_768, 128), &facts);
            assert!(known.contains(&shape(plan.tile())), "{plan}");
        }
    }
    for (tile, rows, splits) in tiles {
        let desc = ProblemDesc::new(dims(rows / 4, 4, 400, 128), Dtype::F16);
        let counted = count(&desc, tile.with_splits(splits)).kv;
        let expected = kv_bytes(&tile, splits, [rows, 400, 128]).map(|bytes| bytes as u64);
        assert_eq!(counted, expected, "{tile:?}");
    }
}

/// A plan finds a tile of prefill for every length of rows within the 32 KiB of a threadgroup: of 16 bits up to 512 elements, of f32 up to
/// 320. Longer rows of f32 are computed by decode.
#[test]
fn prefill_of_every_dimension_fits_in_threadgroup_memory() {
    let mut decoded = Vec::new();
    for dtype in [Dtype::F16, Dtype::BF16, Dtype::F32] {
        for dim in (16..=512).step_by(16) {
            let all = Dims { q_heads: 32, kv_heads: 8, ..dims(512, 1, 512, dim) };
            let plan = plan(&ProblemDesc::new(all, dtype).validate().unwrap(), &M1);
            assert!(plan.launches().instances()[0].shared_bytes() <= M1.shared_per_group, "{dtype} {dim}");
            if !plan.tile().is_prefill() {
                decoded.push((dtype, dim));
            }
        }
    }
    let long: Vec<_> = (336..=512).step_by(16).map(|dim| (Dtype::F32, dim)).collect();
    assert_eq!(decoded, long);
}
