//! The kernel's mask tiles are Skip, Full or Partial as a plain loop finds them.

use flashtile_gpu::kernels::mask_tiles::{Mask, mask_tiles};
use flashtile_kernel::simulator::{Memory, Simulator};
use flashtile_kernel::{bf16, f16};
use flashtile_testkit::Rng;

/// A mask `[batch, heads, queries, keys]` whose blocks are of all kinds: what it adds at each place.
fn biases(rng: &mut Rng, [batch, heads, queries, keys]: [usize; 4], [rows, columns]: [usize; 2]) -> Vec<f32> {
    let [tall, wide] = [queries.div_ceil(rows), keys.div_ceil(columns)];
    let kinds: Vec<usize> = (0..batch * heads * tall * wide).map(|_| rng.below(5)).collect();
    let mut all = Vec::new();
    for plane in 0..batch * heads {
        for row in 0..queries {
            for column in 0..keys {
                let last = row % rows == (queries - 1 - row / rows * rows).min(rows - 1)
                    && column % columns == (keys - 1 - column / columns * columns).min(columns - 1);
                all.push(match kinds[(plane * tall + row / rows) * wide + column / columns] {
                    0 => 0.0,
                    1 => f32::NEG_INFINITY,
                    2 if last => f32::NEG_INFINITY,
                    3 if last => 0.0,
                    2 => -0.0,
                    3 => f32::NEG_INFINITY,
                    _ => [0.0, f32::NEG_INFINITY, 0.5, f32::NAN][rng.below(4)],
                });
            }
        }
    }
    all
}

/// Compares the mask tiles of a mask of this shape, whose `shared` axes have stride 0, with a plain loop.
fn agree_with_a_plain_loop(rng: &mut Rng, shape: [usize; 4], shared: [bool; 4], block: [usize; 2]) {
    let [batch, heads, queries, keys] = shape;
    let held: [usize; 4] = std::array::from_fn(|n| if shared[n] { 1 } else { shape[n] });
    let dense = [held[1] * held[2] * held[3], held[2] * held[3], held[3], 1];
    let strides: [usize; 4] = std::array::from_fn(|n| if shared[n] { 0 } else { dense[n] });
    for kind in 0..4u32 {
        let mut biases = biases(rng, held, block);
        if kind == 3 {
            biases.iter_mut().for_each(|x| *x = if *x == 0.0 { 0.0 } else { f32::NEG_INFINITY });
        }
        let bytes: Vec<u8> = match kind {
            0 => biases.iter().flat_map(|x| x.to_le_bytes()).collect(),
            1 => biases.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
            2 => biases.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
            _ => biases.iter().map(|x| u8::from(*x == 0.0)).collect(),
        };
        let [rows, columns] = block;
        let [tall, wide] = [queries.div_ceil(rows), keys.div_ceil(columns)];
        let mask = Memory::from_slice(&bytes);
        let mut tiles = Memory::uninit::<u8>(batch * heads * tall * wide);
        mask_tiles::Call {
            mask: mask.view(),
            params: Mask {
                strides: [strides[0], strides[1], strides[2]].map(|n| n as u64),
                step: strides[3] as u32,
                kind,
                heads: heads as u32,
                queries: queries as u32,
                keys: keys as u32,
                rows: rows as u32,
                columns: columns as u32,
                unused: 0,
            },
            mask_tiles: tiles.view_mut(),
            groups: [wide as u32, tall as u32, (batch * heads) as u32],
        }
        .launch_instance(&Simulator::new(), &mask_tiles::instance())
        .unwrap();
        let tiles = tiles.to_vec::<u8>().unwrap();
        for (n, tile) in tiles.iter().enumerate() {
            let (plane, y, x) = (n / wide / tall, n / wide % tall, n % wide);
            let first = plane / heads * strides[0] + plane % heads * strides[1];
            let inside = (y * rows..((y + 1) * rows).min(queries)).flat_map(|row| {
                let columns = x * columns..((x + 1) * columns).min(keys);
                columns.map(move |column| first + row * strides[2] + column * strides[3])
            });
            let inside: Vec<f32> = inside.map(|at| biases[at]).collect();
            let want = if inside.iter().all(|x| *x == f32::NEG_INFINITY) {
                0
            } else if inside.iter().all(|x| *x == 0.0) {
                2
            } else {
                1
            };
            assert_eq!(
                *tile, want,
                "block {n} of {shape:?}, shared {shared:?}, blocks {block:?}, kind {kind}"
            );
        }
    }
}

#[test]
fn classes_agree_with_a_plain_loop() {
    let mut rng = Rng::new(1);
    let shapes = [
        ([1, 1, 1, 1], [8, 16]),
        ([2, 3, 17, 65], [8, 32]),
        ([1, 2, 33, 70], [32, 64]),
        ([2, 1, 64, 128], [64, 128]),
    ];
    for (shape, block) in shapes {
        agree_with_a_plain_loop(&mut rng, shape, [false; 4], block);
    }
}

#[test]
fn masks_and_blocks_of_any_size() {
    let mut rng = Rng::new(2);
    for (queries, keys) in [(1, 200), (3, 31), (31, 33), (33, 1), (33, 31), (31, 3)] {
        for block in [[1, 1], [3, 31], [31, 3], [33, 33]] {
            // Blocks of one element of a large mask would only take long.
            if queries * keys <= 100 * block[0] * block[1] {
                agree_with_a_plain_loop(&mut rng, [1, 2, queries, keys], [false; 4], block);
            }
        }
    }
}

#[test]
fn masks_whose_axes_are_one_element_for_all() {
    let mut rng = Rng::new(3);
    for axes in 1..16 {
        let shared = std::array::from_fn(|n| axes >> n & 1 == 1);
        agree_with_a_plain_loop(&mut rng, [2, 3, 9, 35], shared, [8, 16]);
    }
}
