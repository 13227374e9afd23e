//! Names that the language gives a meaning, where the crate of a kernel gives them another: the printed source would be another
//! function than the native one, or than the one that its reader sees.
#![allow(non_camel_case_types, unused)]

use flashtile_kernel_macros::{constant, device, kernel, params};

pub mod functions {
    use flashtile_kernel::prelude::*;

    fn barrier() {}

    fn shared<T>(_: usize) -> T {
        loop {}
    }

    #[device]
    pub fn waits(x: u32) -> u32 {
        barrier();
        x
    }

    #[kernel(threads = 32)]
    pub fn makes(out: &mut Buffer<f32>) {
        let mut tile: Shared<f32> = shared(32);
        tile[thread_index()] = 1.0;
        out[thread_index()] = tile[thread_index()];
    }
}

pub mod imports {
    use crate::elsewhere::select;
    use crate::elsewhere::thread_index as threads;
    use flashtile_kernel::prelude::*;

    #[device]
    pub fn selects(x: u32) -> u32 {
        select(x > threads(), 1u32, x)
    }
}

pub mod elsewhere {
    pub fn select(_: bool, _: u32, b: u32) -> u32 {
        b
    }

    pub fn thread_index() -> u32 {
        0
    }
}

pub mod modules {
    use flashtile_kernel::prelude::*;

    mod f32 {
        pub const MAX: u32 = 7;
    }

    mod half {
        pub mod f16 {
            pub fn from_bits(bits: u16) -> u16 {
                bits
            }
        }
    }

    #[device]
    pub fn plus_max(a: u32) -> u32 {
        a + f32::MAX
    }

    mod bf16 {
        pub fn from_f32(_: f32) -> u16 {
            0
        }
    }

    #[device]
    pub fn rounded(a: f32) -> u16 {
        bf16::from_f32(a)
    }

    #[device]
    pub fn bits(a: u16) -> u16 {
        half::f16::from_bits(a)
    }
}

pub mod aliases {
    use flashtile_kernel::prelude::*;

    type u32 = u64;
    type usize = i32;
    type f16 = u16;

    #[device]
    pub fn parameters(a: u32) -> i64 {
        a as i64
    }

    #[device]
    pub fn casts(a: i64) -> i64 {
        a as u32 as i64
    }

    #[device]
    pub fn lengths<const N: usize>(a: i64) -> i64 {
        a
    }

    #[device]
    pub fn elements(x: &Buffer<f16>) -> i64 {
        1
    }

    #[device]
    pub struct Fields {
        pub a: f16,
    }

    #[params]
    #[derive(Clone, Copy)]
    pub struct Sizes {
        pub n: u32,
    }
}

pub mod types {
    use flashtile_kernel::prelude::{Element, device};

    pub struct Buffer<T>(T);
    pub type Shared<T> = flashtile_kernel::Buffer<T>;

    #[derive(Clone, Copy)]
    pub struct Fragment<T>(T);

    impl<T: Element> Fragment<T> {
        pub fn zero() -> Fragment<T> {
            Fragment(T::from_f32(0.0))
        }
    }

    #[device]
    pub fn buffers(x: &Buffer<f32>) -> u32 {
        1
    }

    #[device]
    pub fn arrays(x: &Shared<f32>) -> u32 {
        1
    }

    #[device]
    pub fn fragments() -> u32 {
        let _ = Fragment::<f32>::zero();
        1
    }
}

pub mod bounds {
    use flashtile_kernel::prelude::device;

    pub trait Element: Copy {
        fn to_f32(self) -> f32;
    }

    #[device]
    pub fn converts<T: Element>(x: T) -> u32 {
        1
    }
}

/// Traits with methods of the language, where the language's are not imported.
pub mod methods {
    use flashtile_kernel::prelude::device;

    pub trait Roots {
        fn rsqrt(self) -> f32;
        fn to_f32(self) -> f32;
        fn from_f32(x: f32) -> f32;
    }

    impl Roots for f32 {
        fn rsqrt(self) -> f32 {
            0.0
        }
        fn to_f32(self) -> f32 {
            0.0
        }
        fn from_f32(_: f32) -> f32 {
            0.0
        }
    }

    #[device]
    pub fn roots(x: f32) -> f32 {
        x.rsqrt()
    }

    #[device]
    pub fn converted(x: f32) -> f32 {
        x.to_f32() + f32::from_f32(x)
    }
}

/// One name in another namespace, and the language's own items by other paths: nothing is refused.
pub mod accepted {
    use flashtile_kernel::intrinsics::simd_sum;
    use flashtile_kernel::prelude::Buffer as _;
    use flashtile_kernel::prelude::{self, bf16, device, f16};

    mod barrier {}
    mod thread_index {}

    #[device]
    pub fn summed(x: &prelude::Buffer<f32>, i: u32) -> f32 {
        barrier();
        simd_sum(x[i + thread_index()]).max(0.0)
    }

    mod f32 {}

    #[device]
    pub fn halved<T: prelude::Element>(x: T) -> f32 {
        0.5 * x.to_f32()
    }

    macro_rules! assert {
        ($($any:tt)*) => {
            compile_error!("a macro of the crate")
        };
    }

    #[device]
    pub fn constants(x: u32) -> f32 {
        let a = if x > u32::MAX / 2 { f16::from_bits(1) } else { f16::from_f32(2.0) };
        let b = bf16::from_f32(a.to_f32());
        b.to_f32()
    }

    #[device]
    pub fn asserted<const N: usize>(x: f32) -> f32 {
        const { assert!(N > 0, "there is one") }
        x
    }
}

fn main() {}
