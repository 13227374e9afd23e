//! All is copied, and nothing else.

use flashtile_gpu::kernels::copy::copy;
use flashtile_kernel::simulator::{Memory, Simulator};

#[test]
fn any_number_of_vectors_is_copied() {
    for n in [0u32, 1, 3, 31, 33, 255, 256, 257] {
        let numbers: Vec<f32> = (0..4 * n).map(|n| n as f32 - 0.5).collect();
        let x = Memory::from_slice(&numbers);
        let mut out = Memory::from_slice(&vec![7.0f32; numbers.len() + 4]);
        copy::Call { x: x.view(), out: out.view_mut(), n, groups: [n / 256 + 1, 1, 1] }
            .launch_instance(&Simulator::new(), &copy::instance())
            .unwrap();
        assert_eq!(out.to_vec::<f32>().unwrap(), [numbers, vec![7.0; 4]].concat(), "{n}");
    }
}

#[test]
fn products_add_up() {
    use flashtile_gpu::kernels::products::products;
    let mut out = Memory::uninit::<f32>(512);
    products::Call { out: out.view_mut(), rounds: 3, groups: [1, 1, 1] }
        .launch::<f32>(&Simulator::new())
        .unwrap();
    // Lane l holds elements of row r and columns c and c + 1 of both operands: see `Fragment`.
    let lane = |r: usize, c: usize| (r & 4) * 4 + (r & 3) * 2 + (c & 4) * 2 + (c & 2) / 2;
    let left = |r, c| lane(r, c) as f32 * 0.001;
    let right = |r, c| 0.5 - lane(r, c) as f32 * 0.01;
    for (at, got) in out.to_vec::<f32>().unwrap().into_iter().enumerate() {
        let (r, c) = (at % 64 / 8, at % 8);
        let product: f32 = (0..8).map(|k| left(r, k) * right(k, c)).sum();
        let want = 6.0 + 4.0 * 3.0 * product;
        assert!((got - want).abs() < 1e-5, "{at}: {got} for {want}");
    }
}
