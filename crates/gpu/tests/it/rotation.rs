//! The rotation is that of the codecs, bit for bit.

use flashtile_core::codec::{Rotation, rotate, unrotate};
use flashtile_core::isa::IsaToken;
use flashtile_gpu::kernels::rotation::hadamard;
use flashtile_kernel::Instance;
use flashtile_kernel::simulator::{Memory, Simulator};
use flashtile_testkit::Rng;

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|x| x.to_bits()).collect()
}

fn same_bits(instance: &Instance, dim: usize) {
    let (rotation, token) = (Rotation::new(dim), IsaToken::best());
    let mut rng = Rng::new(dim as u64);
    for (rows, back) in [(1, false), (3, true), (31, false), (33, true)] {
        let numbers: Vec<f32> =
            (0..rows * dim).map(|n| rng.normal() * 10f32.powi((n / dim) as i32 % 9 - 4)).collect();
        let mut wanted = numbers.clone();
        for row in wanted.chunks_exact_mut(dim) {
            if back { unrotate(token, &rotation, row) } else { rotate(token, &rotation, row) }
        }
        let (x, factors) = (Memory::from_slice(&numbers), Memory::from_slice(&rotation.factors()));
        let mut out = Memory::uninit::<f32>(rows * dim);
        hadamard::Call {
            x: x.view(),
            factors: factors.view(),
            out: out.view_mut(),
            rows: rows as u32,
            back,
            groups: [rows.div_ceil(4) as u32, 1, 1],
        }
        .launch_instance(&Simulator::new().seed(rows as u64), instance)
        .unwrap();
        assert_eq!(bits(&out.to_vec::<f32>().unwrap()), bits(&wanted), "{rows} rows of {dim}, back: {back}");
    }
}

#[test]
fn rotations_are_those_of_the_codecs() {
    same_bits(&hadamard::instance::<16, 1>(), 16);
    same_bits(&hadamard::instance::<48, 12>(), 48);
    same_bits(&hadamard::instance::<64, 1>(), 64);
    same_bits(&hadamard::instance::<80, 20>(), 80);
    same_bits(&hadamard::instance::<96, 12>(), 96);
    same_bits(&hadamard::instance::<128, 1>(), 128);
    same_bits(&hadamard::instance::<192, 12>(), 192);
    same_bits(&hadamard::instance::<256, 1>(), 256);
    same_bits(&hadamard::instance::<320, 20>(), 320);
    same_bits(&hadamard::instance::<384, 12>(), 384);
    same_bits(&hadamard::instance::<512, 1>(), 512);
}
