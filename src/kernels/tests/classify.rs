//! Classes of blocks of masks are those of a plain loop.

use crate::kernels::classify::{Mask, classify};
use crate::testkit::Rng;
use flashtile_kernel::simulator::{Memory, Simulator};
use flashtile_kernel::{bf16, f16};

/// A mask `[batch, heads, queries, keys]` whose blocks are of all classes: what it adds at each place.
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

#[test]
fn classes_are_those_of_a_plain_loop() {
    let mut rng = Rng::new(1);
    let shapes = [
        ([1, 1, 1, 1], [8, 16]),
        ([2, 3, 17, 65], [8, 32]),
        ([1, 2, 33, 70], [32, 64]),
        ([2, 1, 64, 128], [64, 128]),
    ];
    for (shape, block) in shapes {
        let [batch, heads, queries, keys] = shape;
        for kind in 0..4u32 {
            let mut biases = biases(&mut rng, shape, block);
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
            let mut classes = Memory::uninit::<u8>(batch * heads * tall * wide);
            classify::Call {
                mask: mask.view(),
                params: Mask {
                    strides: [heads * queries * keys, queries * keys, keys].map(|n| n as u64),
                    step: 1,
                    kind,
                    heads: heads as u32,
                    queries: queries as u32,
                    keys: keys as u32,
                    rows: rows as u32,
                    columns: columns as u32,
                    unused: 0,
                },
                classes: classes.view_mut(),
                groups: [wide as u32, tall as u32, (batch * heads) as u32],
            }
            .launch_instance(&Simulator::new(), &classify::instance())
            .unwrap();
            let classes = classes.to_vec::<u8>().unwrap();
            for (n, class) in classes.iter().enumerate() {
                let (plane, y, x) = (n / wide / tall, n / wide % tall, n % wide);
                let rows = y * rows..((y + 1) * rows).min(queries);
                let cells = rows.flat_map(|row| {
                    (x * columns..((x + 1) * columns).min(keys)).map(move |c| row * keys + c)
                });
                let inside: Vec<f32> = cells.map(|at| biases[plane * queries * keys + at]).collect();
                let want = if inside.iter().all(|x| *x == f32::NEG_INFINITY) {
                    0
                } else if inside.iter().all(|x| *x == 0.0) {
                    2
                } else {
                    1
                };
                assert_eq!(*class, want, "block {n} of {shape:?}, kind {kind}");
            }
        }
    }
}
