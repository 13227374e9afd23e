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
